// detector.cu under the stock libtsan: `main SCENARIO BUG SEEDS` launches it with seeds from 0 on, and prints what each launch
// returned. Buffers and policies are those of tests/test_detector.py.
#include <cstdlib>

#include "detector.cu"

// Containers of mk::host::Agent: the emulator's heap of copies, which lanes share with the scheduler.
extern "C" const char* __tsan_default_suppressions() { return "race:<mk::host::Agent"; }

// Instead of libtsan's, which count as accesses: only the emulator calls these, for what no lane does (polls, poison, landings).
// Volatile, lest the compiler see a memset in a memset.
extern "C" {
MK_RAW void* memset(void* to, int value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) static_cast<volatile char*>(to)[i] = static_cast<char>(value);
  return to;
}
MK_RAW void* memcpy(void* to, const void* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}
MK_RAW int memcmp(const void* a, const void* b, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    const int difference = static_cast<const volatile unsigned char*>(a)[i] - static_cast<const unsigned char*>(b)[i];
    if (difference != 0) return difference;
  }
  return 0;
}
}

namespace {

constexpr mk::u64 kBytes[mk::host::kBufferCount] = {0, 4096, 1024, 256, 0, 0, 0};  // weights, kv, exchange
constexpr mk::u64 kMostBytes = 4096;

alignas(256) char buffers[mk::host::kBufferCount][kMostBytes];

int launch(const mk::u32 (&shape)[2], mk::u64 seed) {
  mk::host::HangRecord hang;
  mk::host::LaunchResult result{};
  result.hangs = &hang;
  result.hang_capacity = 1;
  mk::host::LaunchArgs args{};
  for (mk::u32 i = 0; i < mk::host::kBufferCount; ++i) {
    std::memset(buffers[i], 0, kMostBytes);
    args.buffers[i] = buffers[i];
    args.buffer_bytes[i] = kBytes[i];
  }
  args.shape = shape;
  args.shape_words = 2;
  args.blocks = 2;
  args.threads = 64;
  args.cluster = 1;
  args.smem_bytes = 4096;
  args.seed = seed;
  args.policy = static_cast<mk::host::Policy>(seed % 5);
  args.result = &result;
  return mk_host_run(&args);
}

}  // namespace

int main(int, char** argv) {
  const mk::u32 shape[2] = {static_cast<mk::u32>(std::atoi(argv[1])), static_cast<mk::u32>(std::atoi(argv[2]))};
  for (int seed = 0; seed < std::atoi(argv[3]); ++seed) std::printf("%d\n", launch(shape, static_cast<mk::u64>(seed)));
  return 0;
}
