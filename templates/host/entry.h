// The exported functions of an emulated kernel's library; kernel.cu ends with MK_HOST_ENTRY.
#pragma once

#include <array>
#include <chrono>

#include "host/scheduler.h"

namespace mk::host {

struct SwitchBench {
  Context outside, inside;
};

static SwitchBench switch_bench;

MK_FN void bounce() {
  for (;;) switch_context(switch_bench.inside, switch_bench.outside);
}

// Wall time of one fiber switch, in nanoseconds.
MK_FN double measure_switch_ns() {
  constexpr int kRounds = 1 << 20;
  StackPool stack;
  if (!stack.reserve(1)) return -1.0;
  stack.prepare(switch_bench.inside, 0, bounce);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) switch_context(switch_bench.outside, switch_bench.inside);
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / (2.0 * kRounds);
}

// What a kernel takes first: buffers, paged or not.
template <class B, class... Others>
B first_argument(void (*)(B, Others...));
template <class Kernel, class... Others>
constexpr std::array<Kernel*, 1 + sizeof...(Others)> table_of(Kernel* first, Others*... others) {
  return {first, others...};
}

}  // namespace mk::host

#define MK_EXPORT extern "C" __attribute__((visibility("default")))

// Defines what Python calls: a launch of `kernel(mk::Buffers, Shape)`, whatever buffers it takes (result: kOk, kHung, kFault or kBadArgs), and the
// price of a fiber switch.
#define MK_HOST_ENTRY(kernel, Shape)                                         \
  MK_HOST_RUN(mk::host::first_argument(&kernel), Shape, kernel(buffers, shape))

// The same for several kernels that are also told a layer: the launch says which.
#define MK_HOST_LAUNCHES(Shape, ...)                                                          \
  constexpr auto mk_host_kernels = mk::host::table_of(__VA_ARGS__);                           \
  MK_HOST_RUN(mk::host::first_argument(mk_host_kernels[0]), Shape, mk_host_kernels[mk::host::rt.args->kernel](buffers, shape, mk::host::rt.args->layer))

#define MK_HOST_RUN(buffers_of, Shape, call)                                 \
  static void mk_host_enter() {                                              \
    decltype(buffers_of) buffers;                                            \
    Shape shape;                                                             \
    std::memcpy(&buffers, mk::host::rt.args->buffers, sizeof buffers);       \
    std::memcpy(&shape, mk::host::rt.args->shape, sizeof shape);             \
    call;                                                                    \
  }                                                                          \
  MK_EXPORT int mk_host_run(const mk::host::LaunchArgs* args) {              \
    return mk::host::run(args, sizeof(Shape), mk_host_enter);                \
  }                                                                          \
  MK_EXPORT double mk_host_switch_ns() { return mk::host::measure_switch_ns(); }
