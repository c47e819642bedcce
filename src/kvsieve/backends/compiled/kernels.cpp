// The C interface of the CPU kernels; compiled for the machine that runs them.
#include "attend.h"
#include "evict.h"
#include "mass.h"
#include "seed.h"
#include "select.h"

using namespace kvsieve;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Element types: 0 float32, 1 bfloat16, 2 float16. Returns the K/V tokens read.
EXPORT int64_t kvsieve_attend(const Attention* a, int64_t type) {
  if (type == 1) return attend<BFloat16>(*a);
  if (type == 2) return attend<Float16>(*a);
  return attend<float>(*a);
}

EXPORT void kvsieve_seed(const Seeding* s, int64_t type) {
  if (type == 1) return seed<BFloat16>(*s);
  if (type == 2) return seed<Float16>(*s);
  seed<float>(*s);
}

EXPORT void kvsieve_mass(const Crediting* c) { credit(*c); }

EXPORT void kvsieve_trim(const Trimming* t) { trim(*t); }

EXPORT void kvsieve_select(const Choice* c) { select(*c); }

struct Writing {
  int64_t tokens, heads, blocks, page_size;
  const int64_t *to_blocks, *offsets;  // [tokens]
  const char *k, *v;                   // [tokens, heads, width]; the last axis is dense
  int64_t k_token, k_head, v_token, v_head, k_bytes, v_bytes;  // strides and row sizes in bytes
  char *pool_k, *pool_v;               // [heads, blocks, page_size, width], dense
};

// Stores new tokens in their places.
EXPORT void kvsieve_write(const Writing* w) {
#pragma omp parallel for schedule(static) if (w->tokens * w->heads * w->k_bytes > 1 << 18)
  for (int64_t t = 0; t < w->tokens; ++t)
    for (int64_t h = 0; h < w->heads; ++h) {
      const int64_t place = (h * w->blocks + w->to_blocks[t]) * w->page_size + w->offsets[t];
      std::memcpy(w->pool_k + place * w->k_bytes, w->k + t * w->k_token + h * w->k_head, w->k_bytes);
      std::memcpy(w->pool_v + place * w->v_bytes, w->v + t * w->v_token + h * w->v_head, w->v_bytes);
    }
}
