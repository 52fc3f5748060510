// Every PTX instruction that megadsl emits, one wrapper each. Compiled with MK_HOST, the same names run in the emulator.
#pragma once

#include "megadsl/ptx/identity.h"
#include "megadsl/ptx/smem.h"
#include "megadsl/ptx/global.h"
#include "megadsl/ptx/mbarrier.h"
#include "megadsl/ptx/fence.h"
#include "megadsl/ptx/copy.h"
#include "megadsl/ptx/mma.h"
#include "megadsl/ptx/warp.h"
#include "megadsl/ptx/block.h"
#include "megadsl/ptx/cluster.h"
#include "megadsl/ptx/launch.h"
#include "megadsl/ptx/code.h"
#include "megadsl/ptx/registers.h"
#include "megadsl/ptx/time.h"
#include "megadsl/ptx/math.h"
#include "megadsl/ptx/poll.h"
#include "megadsl/ptx/mutant.h"

#if defined(MK_HOST)
#include "host/entry.h"
#endif
