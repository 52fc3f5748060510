"""From text to binary: compilers, the cache, the resource report."""
