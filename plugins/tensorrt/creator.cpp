#include "creator.h"

#include <exception>
#include <memory>

#include "attributes.h"
#include "log.h"
#include "plugin.h"

namespace rmsnorm_deploy {

nvinfer1::IPluginV3* NormCreator::createPlugin(const char* layer, const nvinfer1::PluginFieldCollection* fields,
                                               nvinfer1::TensorRTPhase phase) noexcept {
  const std::string who = name_.text + " '" + (layer == nullptr ? "" : layer) + "': ";
  try {
    const nvinfer1::PluginFieldCollection none{};
    const bool from_engine = phase == nvinfer1::TensorRTPhase::kRUNTIME;
    return new NormPlugin(name_, parse_attributes(name_, fields == nullptr ? none : *fields, from_engine));
  } catch (const std::exception& error) {
    log_error(who + error.what());
  } catch (...) {
    log_error(who + "unknown failure");
  }
  return nullptr;
}

const nvinfer1::PluginFieldCollection* NormCreator::getFieldNames() noexcept { return &declared_fields(); }
const char* NormCreator::getPluginName() const noexcept { return name_.text.c_str(); }
const char* NormCreator::getPluginVersion() const noexcept { return kVersion; }
const char* NormCreator::getPluginNamespace() const noexcept { return kNamespace; }

const std::vector<nvinfer1::IPluginCreatorInterface*>& all_creators() {
  static const auto creators = [] {
    std::vector<std::unique_ptr<NormCreator>> made;
    for (const OpName& name : op_names()) made.push_back(std::make_unique<NormCreator>(name));
    return made;
  }();
  static const auto pointers = [] {
    std::vector<nvinfer1::IPluginCreatorInterface*> listed;
    for (const auto& creator : creators) listed.push_back(creator.get());
    return listed;
  }();
  return pointers;
}

}  // namespace rmsnorm_deploy
