// What goes between memory and registers, on a device and in the emulator.
#pragma once

#include <stdint.h>

namespace rmsnorm {

// What an access to global memory is for. The emulator counts by it; on the device it vanishes.
enum class Site { kX, kSkip, kScale, kBias, kY, kSum, kXAgain, kSkipAgain, kPartials };

template <int BYTES>
struct Bits {
  uint32_t word[BYTES / 4];
};
template <>
struct Bits<2> {
  uint16_t word[1];
};

}  // namespace rmsnorm
