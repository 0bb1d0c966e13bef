// malloc and its relatives as glibc has them, counted: to be preloaded. Every part of a process comes by here: torch's
// allocator and its operators' own vectors, numpy, native.cpp, gloo. Python's small objects do not: they have arenas.

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

static std::atomic<long> live, most;

static void* taken(void* block) {
  const long size = static_cast<long>(malloc_usable_size(block)), now = live += size;
  for (long before = most; before < now && !most.compare_exchange_weak(before, now);) {
  }
  return block;
}

void* malloc(size_t size) noexcept { return taken(__libc_malloc(size)); }

void* calloc(size_t count, size_t size) noexcept { return taken(__libc_calloc(count, size)); }

void* realloc(void* block, size_t size) noexcept {
  const long before = static_cast<long>(malloc_usable_size(block));
  void* moved = __libc_realloc(block, size);
  if (!moved && size) return moved;  // there was no room: the block stays
  live -= before;
  return taken(moved);
}

void free(void* block) noexcept {
  live -= static_cast<long>(malloc_usable_size(block));
  __libc_free(block);
}

void* memalign(size_t alignment, size_t size) noexcept { return taken(__libc_memalign(alignment, size)); }

void* aligned_alloc(size_t alignment, size_t size) noexcept { return memalign(alignment, size); }

int posix_memalign(void** block, size_t alignment, size_t size) noexcept {
  void* made = memalign(alignment, size);
  if (!made) return ENOMEM;
  *block = made;
  return 0;
}

// Bytes that are allocated now, and the most that were since `counted_restart`.
long counted_live() { return live; }

long counted_most() { return most; }

void counted_restart() { most = live.load(); }
}
