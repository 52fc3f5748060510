// The conversions whose results an exchange sends as they are (mk::Converted), on whatever the host lays into `from`.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;

extern "C" __global__ void convert(const mk::u32* from, mk::u32* to, mk::u32 count) {
  for (mk::u32 i = ptx::block_id() * 256 + ptx::thread_id(); i < count; i += ptx::num_blocks() * 256) {
    const float v = ptx::bits_float(ptx::ld_global<mk::u32>(from + i));
    ptx::st_global<mk::u32>(to + 2 * i, ptx::pack_bf16(v, v));
    ptx::st_global<mk::u32>(to + 2 * i + 1, ptx::to_bf16(v));
  }
}
