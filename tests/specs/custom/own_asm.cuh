#include "megadsl/custom.h"

template <class Op, class Out>
MK_DEV void scale(const Op& op, const Out& out) {
  asm volatile("bar.sync 1, 256;");  // asm in a comment is none
}
