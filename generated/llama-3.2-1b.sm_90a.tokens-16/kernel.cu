// decode_step: one decode step, 16 new tokens at most, sm_90a.
// Written by megadsl from llama.py:10; edit the spec or the schedule, not this file.
//
// loader       warps 8 to 8 of every block (loader)
// consumer     warps 0 to 7 of every block (consumer)
// Model shapes, the number of blocks and all offsets are data (Shape); only tile, stage and fragment sizes are compiled in.
#include "megadsl/kernel.h"

// role: common
namespace {

using mk::u32, mk::u64, mk::smem_ptr;

constexpr u32 kTokens = 16;
constexpr u32 kBatch = 4;  // row groups whose partial sums meet at once
constexpr u32 kThreads = 384;
using Block = mk::Block<kTokens, 8, 0>;
using Copies = mk::BulkCopies;
using LoaderRing = mk::Ring<11, 16384, Copies>;  // weights
using QkvProjTiles = mk::Tiles<32, 2, 1>;
using OProjTiles = mk::Tiles<32, 2, 1>;
using GateUpProjTiles = mk::Tiles<32, 2, 1>;
using DownProjTiles = mk::Tiles<32, 2, 4>;
using LmHeadTiles = mk::Tiles<32, 2, 1>;
using AttentionTiling = mk::AttentionTiling<64, Block>;

}  // namespace

struct Shape {
  mk::StepShape step;
  mk::SmemShape smem;
  mk::RingShape ring_loader;
  mk::ExchangeShape x_exchange;  // Sentinel, bf16
  mk::ExchangeShape qkv_proj_exchange;  // Sentinel, bf16
  mk::ExchangeShape attention_exchange;  // Sentinel, bf16
  mk::ExchangeShape o_proj_exchange;  // Sentinel, bf16
  mk::ExchangeShape gate_up_proj_exchange;  // Sentinel, bf16
  mk::ExchangeShape attention_parts_exchange;  // Tagged, f32
  mk::ExchangeShape down_proj_parts_exchange;  // Tagged, f32
  mk::ExchangeShape lm_head_best_exchange;  // Tagged, u32
  mk::i32 x_kept;
  mk::i32 o_proj_kept;
  mk::EmbedShape embed_tokens;
  mk::LinearShape qkv_proj;
  mk::RopeShape qkv_proj_rope;
  mk::VectorShape qkv_proj_input_layernorm;
  mk::AttentionShape attention;
  mk::MergeShape attention_merge;
  mk::LinearShape o_proj;
  mk::LinearShape gate_up_proj;
  mk::VectorShape gate_up_proj_post_attention_layernorm;
  mk::i32 gate_up_proj_post_attention_layernorm_copy;
  mk::LinearShape down_proj;
  mk::LinearShape lm_head;
  mk::i32 lm_head_candidates;
  mk::VectorShape lm_head_norm;
};

namespace {

// role: loader
// One lane streams weights and cached rows through the ring. Dense weights wait for nothing but room in the ring.
MK_DEV void role_loader(mk::Context& cx, const mk::Buffers& buffers, const Shape& s, const mk::Step& step, const LoaderRing& ring) {
  mk::trace_enter(cx, buffers.trace, {0, 2, 8}, u32(s.step.records));
  mk::Tape<LoaderRing> tape(cx, buffers, ring, mk::ptx::smem_base().at<mk::TapeEntry>(s.ring_loader.tape), {u32(s.ring_loader.window), u32(s.ring_loader.meeting_window), mk::ptx::smem_base().at<u32>(s.step.meeting)}, step, u32(s.step.layers) + 1);
  const u64 evict_first = mk::ptx::policy_evict_first();
  const u64 evict_normal = mk::ptx::policy_evict_normal();
  // The tape is written while it is first played: an op's copies fly while the entries of the next are worked out.
  mk::Walk<0, 5, 6> walk = {u32(s.step.layers), mk::Steps{mk::ptx::smem_base().at<u32>(s.step.progress)}.count()};
#pragma unroll 1
  for (bool more = true; more;) {
    const u32 built = tape.size;
    if (walk.writes()) switch (walk.phase) {
      // qkv_proj: 3072 x 2048  [llama.py:23]
      case 0:
        tape.vector(0, s.qkv_proj_input_layernorm, evict_first);
        tape.matrix(0, s.qkv_proj, evict_first);
        break;
      // attention: 32 heads of 64 over 8 KV heads  [llama.py:34]
      case 1:
        tape.prefetch(s.down_proj);
        tape.rows(2, u32(s.step.progress) + 20);
        tape.cache<AttentionTiling, Block::kWarps>(1, s.attention, evict_normal);
        break;
      // o_proj: 2048 x 2048  [llama.py:36]
      case 2:
        tape.matrix(3, s.o_proj, evict_first);
        break;
      // gate_up_proj: 16384 x 2048  [llama.py:38]
      case 3:
        tape.vector(4, s.gate_up_proj_post_attention_layernorm, evict_first);
        tape.matrix(4, s.gate_up_proj, evict_first);
        break;
      // down_proj: 2048 x 8192  [llama.py:46]
      case 4:
        tape.matrix(5, s.down_proj, evict_first);
        break;
      // lm_head: 128256 x 2048  [llama.py:50]
      case 5:
        tape.vector(6, s.lm_head_norm, evict_first);
        tape.matrix(6, s.lm_head, evict_first);
        break;
    }
    const auto due = walk.due(built, tape.size);
    cx.layer = walk.layer;
    // tape: the loads of all ops in turn  [llama.py:10]
    tape.play(due.first, due.last);
    more = walk.next(tape.step) && !tape.given_up();
  }
  cx.layer = 0;
  tape.loader.drain();
  mk::trace_leave(cx, step.epoch);
}

// role: consumer
// All warps work on each tile together; what they wait for is either a stage of the ring or another block's vectors.
MK_DEV void role_consumer(mk::Context& cx, const mk::Buffers& buffers, const Shape& s, mk::Step step, const LoaderRing& ring_loader) {
  mk::trace_enter(cx, buffers.trace, {1, 2, 0}, u32(s.step.records));
  Block block(cx, buffers);
  mk::Reader<LoaderRing> read_loader(cx, ring_loader);
  const smem_ptr<char> staged = block.at<char>(s.smem.staged), activations = block.at<char>(s.smem.activations);
  const u32 layers = u32(s.step.layers);
  const mk::Steps steps = {block.at<u32>(s.step.progress)};
  const smem_ptr<mk::u32x2> angles = block.at<mk::u32x2>(s.step.angles);
  mk::load_angles<64>(block, step, steps, angles, u32(s.step.angle_rows));
#pragma unroll 1
  for (bool more = true; more;) {
    [[maybe_unused]] const u32 epoch = step.epoch;


    // embed_tokens: rows of the table  [llama.py:20]
    {
      mk::begin_op(cx, block);
      const mk::Publication<mk::Dense<mk::Sentinel>, false, Block> out(block, s.x_exchange, epoch * (layers + 1), staged, 7);
      mk::run_embed(block, s.embed_tokens, step, steps, out);
      out.publish(block);
      mk::keep(block, s.x_exchange, staged, block.at<char>(s.x_kept));
      mk::acquire_rows(block, step, steps);
    }

    for (u32 layer = 0; layer < u32(s.step.layers); ++layer) {
      cx.layer = layer;

      // qkv_proj: 3072 x 2048  [llama.py:23]
      {
        mk::begin_op(cx, block);
        const mk::Publication<mk::Converted<mk::Dense<mk::Sentinel>>, false, Block> out(block, s.qkv_proj_exchange, epoch * layers + layer, staged, 11);
        const mk::RowGroups own = mk::own_groups(cx, s.qkv_proj);
        const float per_column = 1.0f / float(s.qkv_proj.columns);  // here, where the block waits anyway
        const auto terms = [](float x_, auto& of) {
          of[0] = x_ * x_;  // r0 = mean(x * x)
        };
        mk::WideRows<Block, mk::RowOp::kSum> rows;
        mk::run_matrix<kBatch, QkvProjTiles, true>(
            block, read_loader, 9, s.qkv_proj, s.smem,
            mk::InRegisters{[&](u32 begin, u32 columns, auto& x) {
              const smem_ptr<char> vector_input_layernorm = read_loader.wait_stage(8, 0, 0);  // input_layernorm
              // x * input_layernorm
              mk::poll_operand<mk::Dense<mk::Sentinel>, false, true>(block, 10, s.x_exchange, epoch * (layers + 1) + layer, begin, u32(s.qkv_proj.columns), x, rows, terms,
                               [](const auto& a) { return a[0] * a[1]; }, vector_input_layernorm);  // x
              read_loader.release();
            }},
            [&](u32 group, u32 pair, u32 token, float even, float odd) {
              const u32 row = group * mk::kGroupRows + 2 * pair;
              if (row >= u32(s.qkv_proj_rope.begin) && row < u32(s.qkv_proj_rope.end)) mk::rotate<64>(angles, row - u32(s.qkv_proj_rope.begin), token, even, odd);
              out.put_pair((group - own.begin) * kTokens + token, pair, mk::ptx::pack_bf16(even, odd));
            },
            mk::RowScale{[&] { rows.leave(block, block.at<float>(s.smem.scalars)); },
                         [&](u32 token) {
                           // rsqrt(mean(x * x) + 1e-05)
                           const float r0 = mk::row_total<mk::RowOp::kSum, Block::kWarps>(block.at<float>(s.smem.scalars), token) * per_column;
                           return mk::math::rsqrt(r0 + 1e-05f);
                         }});
        out.publish(block);
      }

      // attention: 32 heads of 64 over 8 KV heads  [llama.py:34]
      {
        mk::begin_op(cx, block);
        mk::run_attention<mk::Dense<mk::Sentinel>, mk::Tagged, AttentionTiling, mk::DensePoll<3, true>, mk::Softmax, false, true>(
            block, read_loader, 12, 13, s.attention, step, layer, s.qkv_proj_exchange, epoch * layers + layer,
            s.attention_parts_exchange, epoch * layers + layer, s.smem.meeting, 0);
      }

      // attention: add the splits  [llama.py:34]
      {
        mk::begin_op(cx, block);
        const mk::Publication<mk::Converted<mk::Dense<mk::Sentinel>>, false, Block> out(block, s.attention_exchange, epoch * layers + layer, staged, 16);
        mk::run_merge<mk::Tagged, AttentionTiling, 8, 1, true>(block, 15, s.attention_merge, s.attention, s.attention_parts_exchange, epoch * layers + layer, out);
        out.publish(block);
      }

      // o_proj: 2048 x 2048  [llama.py:36]
      {
        mk::begin_op(cx, block);
        const mk::Publication<mk::Converted<mk::Dense<mk::Sentinel>>, false, Block> out(block, s.o_proj_exchange, epoch * layers + layer, staged, 18);
        const mk::RowGroups own = mk::own_groups(cx, s.o_proj);
        const smem_ptr<char> kept0 = block.at<char>(s.x_kept);  // x, from this block's own results
        mk::run_matrix<kBatch, OProjTiles, true>(
            block, read_loader, 14, s.o_proj, s.smem,
            mk::InRegisters{[&](u32 begin, u32 columns, auto& x) {
              mk::poll_value<mk::Dense<mk::Sentinel>, true>(block, 17, s.attention_exchange, epoch * layers + layer, begin, u32(s.o_proj.columns), x);  // x
            }},
            [&](u32 group, u32 pair, u32 token, float even, float odd) {
              // x + o_proj
              const u32 unit = (group - own.begin) * kTokens + token;
              const u32 values0 = mk::ptx::ld_shared<u32>(kept0.at<u32>(unit * 16 + pair * 4));
              const float value0_even = mk::ptx::bf16_lo(values0), value0_odd = mk::ptx::bf16_hi(values0);
              out.put_pair(unit, pair, mk::ptx::pack_bf16(value0_even + even, value0_odd + odd));
            });
        out.publish(block);
        mk::keep(block, s.o_proj_exchange, staged, block.at<char>(s.o_proj_kept));
      }

      // gate_up_proj: 16384 x 2048  [llama.py:38]
      mk::Held<GateUpProjTiles, 2, true, false, Block> gate_up_proj_held;
      {
        mk::begin_op(cx, block);
        const mk::Publication<mk::Converted<mk::Dense<mk::Sentinel>>, false, Block> out(block, s.gate_up_proj_exchange, epoch * layers + layer, staged, 22);
        const smem_ptr<char> vector_post_attention_layernorm = block.at<char>(s.gate_up_proj_post_attention_layernorm_copy);  // post_attention_layernorm
        mk::copy_vector(block, read_loader, 19, u32(s.gate_up_proj_post_attention_layernorm.bytes), vector_post_attention_layernorm);
        block.sync();
        mk::hold_tiles(block, read_loader, 20, s.gate_up_proj, gate_up_proj_held, mk::panel_warp(block));
        const mk::RowGroups own = mk::own_groups(cx, s.gate_up_proj);
        const float per_column = 1.0f / float(s.gate_up_proj.columns);  // here, where the block waits anyway
        const auto terms = [](float o_proj_, auto& of) {
          of[0] = o_proj_ * o_proj_;  // r0 = mean(o_proj * o_proj)
        };
        mk::WideRows<Block, mk::RowOp::kSum> rows;
        mk::run_matrix<kBatch, GateUpProjTiles, true>(
            block, read_loader, 20, s.gate_up_proj, s.smem,
            mk::InRegisters{[&](u32 begin, u32 columns, auto& x) {
              // o_proj * post_attention_layernorm
              mk::poll_operand<mk::Dense<mk::Sentinel>, false, true>(block, 21, s.o_proj_exchange, epoch * layers + layer, begin, u32(s.gate_up_proj.columns), x, rows, terms,
                               [](const auto& a) { return a[0] * a[1]; }, vector_post_attention_layernorm);  // o_proj
            }},
            [&](u32 group, u32 pair, u32 token, float even, float odd) {
              // silu(gate_proj) * up_proj
              const u32 unit = (group - own.begin) / 2 * kTokens + token, element = group % 2 * 4 + pair;
              out.put_element(unit, element, mk::ptx::to_bf16(mk::math::silu(even) * odd));
            },
            mk::RowScale{[&] { rows.leave(block, block.at<float>(s.smem.scalars)); },
                         [&](u32 token) {
                           // rsqrt(mean(o_proj * o_proj) + 1e-05)
                           const float r0 = mk::row_total<mk::RowOp::kSum, Block::kWarps>(block.at<float>(s.smem.scalars), token) * per_column;
                           return mk::math::rsqrt(r0 + 1e-05f);
                         }}, gate_up_proj_held);
        out.publish(block);
      }

      // down_proj: 2048 x 8192  [llama.py:46]
      {
        mk::begin_op(cx, block);

        mk::run_matrix_parts<mk::Tagged, kBatch, DownProjTiles>(
            block, read_loader, 23, s.down_proj, s.smem, s.down_proj_parts_exchange, epoch * layers + layer,
            mk::InRegisters{[&](u32 begin, u32 columns, auto& x) {
              mk::poll_value<mk::Dense<mk::Sentinel>, true>(block, 24, s.gate_up_proj_exchange, epoch * layers + layer, begin, mk::min_u32(columns, u32(s.down_proj.columns) - begin), x);  // x
            }});
      }

      // down_proj: add the parts of the columns  [llama.py:46]
      {
        mk::begin_op(cx, block);
        const mk::Publication<mk::Converted<mk::Dense<mk::Sentinel>>, false, Block> out(block, s.x_exchange, epoch * (layers + 1) + layer + 1, staged, 26);
        const mk::RowGroups own = mk::value_groups(cx, s.x_exchange, 1);
        const smem_ptr<char> kept0 = block.at<char>(s.o_proj_kept);  // o_proj, from this block's own results
        mk::add_parts<mk::Tagged, 4, 1, true>(
            block, 25, s.x_exchange, s.down_proj_parts_exchange, epoch * layers + layer,
            [&](u32 group, u32 pair, u32 token, float even, float odd) {
              // o_proj + down_proj
              const u32 unit = (group - own.begin) * kTokens + token;
              const u32 values0 = mk::ptx::ld_shared<u32>(kept0.at<u32>(unit * 16 + pair * 4));
              const float value0_even = mk::ptx::bf16_lo(values0), value0_odd = mk::ptx::bf16_hi(values0);
              out.put_pair(unit, pair, mk::ptx::pack_bf16(value0_even + even, value0_odd + odd));
            });
        out.publish(block);
        mk::keep(block, s.x_exchange, staged, block.at<char>(s.x_kept));
      }
    }
    cx.layer = 0;


    // lm_head: 128256 x 2048  [llama.py:50]
    {
      mk::begin_op(cx, block);
      mk::release_rows<Copies>(block, step, steps);
      const mk::RowGroups own = mk::own_groups(cx, s.lm_head);
      mk::Best best;
      const float per_column = 1.0f / float(s.lm_head.columns);  // here, where the block waits anyway
      const auto terms = [](float x_, auto& of) {
        of[0] = x_ * x_;  // r0 = mean(x * x)
      };
      mk::WideRows<Block, mk::RowOp::kSum> rows;
      mk::run_matrix<kBatch, LmHeadTiles, false>(
          block, read_loader, 28, s.lm_head, s.smem,
          mk::InRegisters{[&](u32 begin, u32 columns, auto& x) {
            const smem_ptr<char> vector_norm = read_loader.wait_stage(27, 0, 0);  // norm
            // x * norm
            mk::poll_operand<mk::Dense<mk::Sentinel>, false, true>(block, 29, s.x_exchange, epoch * (layers + 1) + layers, begin, u32(s.lm_head.columns), x, rows, terms,
                             [](const auto& a) { return a[0] * a[1]; }, vector_norm);  // x
            read_loader.release();
          }},
          [&](u32 group, u32 pair, u32 token, float even, float odd) {
            mk::take_logits(block, s.lm_head, group, pair, token, even, odd, best);
          },
          mk::RowScale{[&] { rows.leave(block, block.at<float>(s.smem.scalars)); },
                       [&](u32 token) {
                         // rsqrt(mean(x * x) + 1e-05)
                         const float r0 = mk::row_total<mk::RowOp::kSum, Block::kWarps>(block.at<float>(s.smem.scalars), token) * per_column;
                         return mk::math::rsqrt(r0 + 1e-05f);
                       }});
      {
        const smem_ptr<mk::u32x2> scratch = block.at<mk::u32x2>(s.lm_head_candidates), winners = scratch + Block::kThreads;
        mk::reduce_best(block, scratch, best, winners);
        more = mk::choose_tokens(block, 30, s.lm_head_best_exchange, epoch, scratch, winners, step, steps, [&]([[maybe_unused]] const mk::Step& next) {
          mk::load_angles<64>(block, next, steps, angles, u32(s.step.angle_rows));
        });
      }
    }
  }
  mk::finish_step(block, step, steps, true);
  mk::leave_steps(block, step, steps);
  mk::trace_leave(cx, step.epoch);
}

// role: common
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    megakernel(const __grid_constant__ mk::Buffers buffers, const __grid_constant__ Shape s) {
  const smem_ptr<char> smem = mk::ptx::smem_base();
  mk::Context cx = mk::enter(buffers, smem.at<u32>(s.step.abort_word), {u32(s.step.blocks), u32(s.step.blocks_inverse)});
  if (!mk::may_run(buffers)) return;
  const mk::Step step = mk::read_step(buffers, kTokens);
  if (!mk::may_run(buffers)) return;
  const LoaderRing ring_loader(smem.at<char>(s.ring_loader.stages), smem.at<u64>(s.ring_loader.barriers));
  if (mk::ptx::thread_id() == 0) {
    ring_loader.init(Block::kWarps);
    Copies::fence_barriers();
  }
  if (mk::ptx::thread_id() == kThreads - 1) {
    mk::ptx::st_shared<u32>(smem.at<u32>(s.step.meeting), 0u);
    for (u32 op = 0; op < 7; ++op) mk::ptx::st_shared<u32>(smem.at<u32>(s.step.gates) + op, mk::gates_before(step, u32(s.step.layers) + 1));
    const u32 steps = mk::steps_asked(cx.control);
    mk::Steps{smem.at<u32>(s.step.progress)}.init(step, steps, mk::ptx::ld_global<u32>(cx.control->positions + (mk::max_u32(step.tokens, 1) - 1)));
    mk::init_block(cx, steps);
  }
  mk::ptx::syncthreads();
  const u32 warp = mk::ptx::warp_id();
  if (warp < 8) {
    mk::ptx::take_registers<192>();
    role_consumer(cx, buffers, s, step, ring_loader);
  } else {
    mk::ptx::give_registers<120>();
    if (warp == 8 && mk::ptx::lane_id() == 0) role_loader(cx, buffers, s, step, ring_loader);
  }
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
