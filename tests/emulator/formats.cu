// Weights of one tile as operands: `panels` panels in the format of that number, as they lie in weights; kv: of each panel the lanes' vectors.
#include "megadsl/formats.h"

namespace {

namespace ptx = mk::ptx;
using mk::u32, mk::u32x4, mk::smem_ptr;

}

struct Shape {
  mk::i32 format;  // as they follow in convert()
  mk::i32 panels;
};

namespace {

template <class Format>
MK_DEV void load_all(const mk::Buffers& b, u32 panels) {
  const u32 lane = ptx::lane_id();
  const smem_ptr<char> tile = ptx::smem_base().at<char>(0);
  for (u32 i = lane; i < mk::ceil_div(panels * Format::kPanelBytes, 16); i += mk::kWarpSize)
    ptx::st_shared<u32x4>(tile.at<u32x4>(i * 16), ptx::ld_global<u32x4>(reinterpret_cast<const u32x4*>(b.weights) + i));
  ptx::syncwarp();
  const Format found(tile, 0, lane / 4, lane % 4), last(tile, panels - 1, lane / 4, lane % 4);
  u32x4* out = reinterpret_cast<u32x4*>(b.kv) + lane;
  for (u32 panel = 0; panel + 1 < panels; ++panel) ptx::st_global<u32x4>(out + panel * mk::kWarpSize, found.load(panel));
  ptx::st_global<u32x4>(out + (panels - 1) * mk::kWarpSize, last.load(0));
}

MK_DEV void convert(const mk::Buffers& b, const Shape& s) {
  if (s.format == 0) load_all<mk::Fp8Weights>(b, u32(s.panels));
  if (s.format == 1) load_all<mk::Int8Weights>(b, u32(s.panels));
  if (s.format == 2) load_all<mk::Nvfp4Weights>(b, u32(s.panels));
  if (s.format == 3) load_all<mk::Mxfp4Weights>(b, u32(s.panels));
  if (s.format == 4) load_all<mk::Int4Weights>(b, u32(s.panels));
}

}  // namespace

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) { convert(b, s); }

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
