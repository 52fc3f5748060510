// Embedding: each block stages its own features of each token's table row.
#pragma once
#include "megadsl/steps.h"

namespace mk {

struct EmbedShape {
  i32 table;     // 16-byte units from the start of the weight arena
  i32 features;
  i32 groups;
  i32 share_offset;
};

// Elements as the table has them.
struct AsStored {
  MK_DEV u16 operator()(u16 bits) const { return bits; }
};

// Tokens past the launch's count become zeros; `map` gives what becomes of the others' elements. Ends behind a barrier, ready to be
// published.
template <class B, class S, class Out, class F = AsStored>
MK_DEV void run_embed(const B& block, const EmbedShape& s, const Step& step, const S& steps, const Out& out, const F& map = {}) {
  const Share own = own_share(block.cx, u32(s.groups), u32(s.share_offset));
  const u32 begin = own.begin * kGroupRows, end = own.end * kGroupRows;
  const u16* table = reinterpret_cast<const u16*>(block.buffers.weights + size_t(u32(s.table)) * 16);
  const bool fed = steps.index(step) != 0;
#pragma unroll 1
  for (u32 i = block.thread; i < (end - begin) * B::kTokens; i += B::kThreads) {
    const u32 token = i / (end - begin), local = i % (end - begin), feature = begin + local;
    u16 bits = 0;
    if (token < step.tokens && feature < u32(s.features)) {
      const u32 id = fed ? steps.token(token) : ptx::ld_global<u32>(block.cx.control->token_ids + token);
      bits = map(ptx::ld_global_nc<u16>(table + size_t(id) * u32(s.features) + feature));
    }
    out.put_element(local / 8 * B::kTokens + token, local % 8, bits);
  }
  block.sync();
}

}  // namespace mk
