#include "attributes.h"

#include <cmath>
#include <cstring>
#include <set>
#include <stdexcept>

namespace rmsnorm_deploy {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

constexpr int32_t kOnnxFloat = 1;
constexpr int32_t kOnnxDouble = 11;
constexpr const char* kFieldNames[] = {"axis", "epsilon", "epsilon_low", "epsilon_mode", "scale_order", "stash_type"};

[[noreturn]] void refuse(const PluginField& field, const std::string& why) {
  throw std::runtime_error("field '" + std::string(field.name) + "' " + why);
}

void demand_data(const PluginField& field) {
  if (field.data == nullptr || field.length < 1) refuse(field, "is empty");
}

int32_t int_of(const PluginField& field) {
  demand_data(field);
  if (field.type == PluginFieldType::kINT32) return *static_cast<const int32_t*>(field.data);
  if (field.type == PluginFieldType::kINT64) return static_cast<int32_t>(*static_cast<const int64_t*>(field.data));
  refuse(field, "is not an integer");
}

float float_of(const PluginField& field) {
  demand_data(field);
  if (field.type == PluginFieldType::kFLOAT32) return *static_cast<const float*>(field.data);
  if (field.type == PluginFieldType::kFLOAT64) return static_cast<float>(*static_cast<const double*>(field.data));
  refuse(field, "is not a float");
}

// With or without a closing zero, as parsers differ.
std::string word_in(const PluginField& field) {
  demand_data(field);
  if (field.type != PluginFieldType::kCHAR) refuse(field, "is not a string");
  const auto* const text = static_cast<const char*>(field.data);
  return std::string(text, strnlen(text, static_cast<size_t>(field.length)));
}

rmsnorm_eps_mode eps_mode_of(const PluginField& field) {
  const std::string word = word_in(field);
  for (const auto mode : {RMSNORM_EPS_INSIDE, RMSNORM_EPS_OUTSIDE, RMSNORM_EPS_CLAMP}) {
    if (word == word_of(mode)) return mode;
  }
  refuse(field, "is '" + word + "', not inside, outside or clamp");
}

rmsnorm_scale_order scale_order_of(const PluginField& field) {
  const std::string word = word_in(field);
  for (const auto order : {RMSNORM_AFTER_CAST, RMSNORM_BEFORE_CAST}) {
    if (word == word_of(order)) return order;
  }
  refuse(field, "is '" + word + "', not after_cast or before_cast");
}

void read_field(const PluginField& field, Attributes& out) {
  const std::string name = field.name;
  if (name == "axis") {
    out.axis = int_of(field);
    if (out.axis >= 0) refuse(field, "is " + std::to_string(out.axis) + ", and counts from the end: it is negative");
  } else if (name == "epsilon") {
    out.epsilon = float_of(field);
    if (!(out.epsilon >= 0.0F)) refuse(field, "is negative or not a number");
  } else if (name == "epsilon_low") {
    out.epsilon_low = float_of(field);
  } else if (name == "epsilon_mode") {
    out.eps_mode = eps_mode_of(field);
  } else if (name == "scale_order") {
    out.scale_order = scale_order_of(field);
  } else if (name == "stash_type") {
    out.stash_type = int_of(field);
    if (out.stash_type == kOnnxDouble) refuse(field, "asks for float64 statistics, and TensorRT has no float64");
    if (out.stash_type != kOnnxFloat) refuse(field, "is " + std::to_string(out.stash_type) + ", not 1 (float32)");
  } else if (name != "plugin_namespace" && name != "plugin_version") {
    refuse(field, "is unknown");
  }
}

// The name says part of what the attributes say. Where they differ, one of the two was lost on the way.
void demand_agreement(const OpName& name, const Attributes& attributes) {
  const auto demand = [&](bool agrees, const char* field, const std::string& value) {
    if (!agrees) throw std::runtime_error("field '" + std::string(field) + "' is " + value + " or missing");
  };
  demand(attributes.eps_mode == name.eps_mode, "epsilon_mode", word_of(attributes.eps_mode));
  demand(attributes.scale_order == name.scale_order, "scale_order", word_of(attributes.scale_order));
  if (name.double_stash) throw std::runtime_error("field 'stash_type' must be 11, and TensorRT has no float64");
}

PluginField text_field(const char* name, const char* word) {
  return PluginField{name, word, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(word)) + 1};
}

}  // namespace

Attributes parse_attributes(const OpName& name, const nvinfer1::PluginFieldCollection& fields, bool from_engine) {
  Attributes out;
  std::set<std::string> seen;
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    read_field(fields.fields[i], out);
    seen.insert(fields.fields[i].name);
  }
  for (const char* const field : kFieldNames) {
    if (from_engine && seen.count(field) == 0) {
      throw std::runtime_error("field '" + std::string(field) + "' is missing");
    }
  }
  demand_agreement(name, out);
  return out;
}

const nvinfer1::PluginFieldCollection& declared_fields() {
  static const PluginField fields[] = {
      {"axis", nullptr, PluginFieldType::kINT32, 1},          {"epsilon", nullptr, PluginFieldType::kFLOAT32, 1},
      {"epsilon_low", nullptr, PluginFieldType::kFLOAT32, 1}, {"epsilon_mode", nullptr, PluginFieldType::kCHAR, 1},
      {"scale_order", nullptr, PluginFieldType::kCHAR, 1},    {"stash_type", nullptr, PluginFieldType::kINT32, 1}};
  static const nvinfer1::PluginFieldCollection collection{6, fields};
  return collection;
}

const nvinfer1::PluginFieldCollection* SerializedAttributes::refresh(const Attributes& attributes) {
  values_ = attributes;
  fields_ = {{"axis", &values_.axis, PluginFieldType::kINT32, 1},
             {"epsilon", &values_.epsilon, PluginFieldType::kFLOAT32, 1},
             {"epsilon_low", &values_.epsilon_low, PluginFieldType::kFLOAT32, 1},
             text_field("epsilon_mode", word_of(values_.eps_mode)),
             text_field("scale_order", word_of(values_.scale_order)),
             {"stash_type", &values_.stash_type, PluginFieldType::kINT32, 1}};
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  return &collection_;
}

}  // namespace rmsnorm_deploy
