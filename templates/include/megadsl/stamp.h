// Time stamps: one plain store by one lane, compiled out unless MK_STAMPS is defined.
#pragma once
#include "megadsl/wait.h"

namespace mk {

// stamps[block][stamp][layer] = globaltimer, ns.
MK_DEV void stamp(const Context& cx, const Buffers& buffers, u32 index, u32 count, u32 layers) {
#if defined(MK_STAMPS)
  if (buffers.stamps != nullptr && ptx::lane_id() == 0)
    ptx::st_global<u64>(buffers.stamps + (size_t(cx.block) * count + index) * layers + cx.layer, ptx::globaltimer());
#else
  (void)cx, (void)buffers, (void)index, (void)count, (void)layers;
#endif
}

}  // namespace mk
