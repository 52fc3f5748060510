// Keeps multiprocessors to itself for a while: one block each, with all the shared memory it is launched with.
#include "megadsl/ptx.h"

extern "C" __global__ void occupy(mk::u64 nanoseconds) {
  const mk::u64 end = mk::ptx::globaltimer() + nanoseconds;
  while (mk::ptx::globaltimer() < end) mk::ptx::nanosleep(1000);
}
