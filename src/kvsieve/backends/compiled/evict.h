// Eviction: of the tokens in a request's slots those of least mass go; the others move together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace kvsieve {

struct Trimming {
  int64_t batch, heads, page_size, stored, kept, sink;
  int64_t blocks, rows;                        // of a KV head in the pool
  const int64_t *block_table, *row_table;      // [batch, pages] each
  int64_t block_table_batch, row_table_batch;  // strides
  const int64_t* recent;                       // [batch]: tokens from this position on stay
  int64_t k_bytes, v_bytes;                    // a token's row
  char *k, *v;                                 // [heads, blocks, page_size, width], dense
  int64_t* position;                           // [heads, rows, page_size], dense
  float* mass;                                 // the same, or null: the oldest stay
};

// One integer per token that orders by mass, then age. Mass is never negative, so its bits order like itself.
inline int64_t rank_of(const Trimming& t, int64_t place) {
  int64_t older = std::numeric_limits<int32_t>::max() - t.position[place];
  if (!t.mass) return older;
  int32_t bits = -1;  // NaN: below everything
  if (t.mass[place] == t.mass[place]) std::memcpy(&bits, t.mass + place, sizeof bits);
  return bits * (int64_t(1) << 32) + older;
}

inline void move_token(const Trimming& t, int64_t from, int64_t to, int64_t row_from, int64_t row_to) {
  std::memcpy(t.k + to * t.k_bytes, t.k + from * t.k_bytes, t.k_bytes);
  std::memcpy(t.v + to * t.v_bytes, t.v + from * t.v_bytes, t.v_bytes);
  t.position[row_to] = t.position[row_from];
  if (t.mass) t.mass[row_to] = t.mass[row_from];
}

inline void trim_segment(const Trimming& t, int64_t b, int64_t h) {
  const auto place = [&](const int64_t* table, int64_t size, int64_t slot) {
    return (h * size + table[slot / t.page_size]) * t.page_size + slot % t.page_size;
  };
  const int64_t* rows = t.row_table + b * t.row_table_batch;
  const int64_t* blocks = t.block_table + b * t.block_table_batch;
  constexpr int64_t stays = std::numeric_limits<int64_t>::max();
  thread_local std::vector<int64_t> ranks, ordered;
  ranks.resize(t.stored);
  for (int64_t slot = 0; slot < t.stored; ++slot) {
    const int64_t at = place(rows, t.rows, slot), position = t.position[at];
    ranks[slot] = position < t.sink || position >= t.recent[b] ? stays : rank_of(t, at);
  }
  const int64_t gone = t.stored - t.kept;  // ranks differ, but for those that stay: they are kept at most
  ordered = ranks;
  std::nth_element(ordered.begin(), ordered.begin() + gone - 1, ordered.end());
  const int64_t last = ordered[gone - 1];
  int64_t gap = 0;
  for (int64_t slot = t.kept; slot < t.stored; ++slot) {
    if (ranks[slot] <= last) continue;
    while (ranks[gap] > last) ++gap;
    move_token(t, place(blocks, t.blocks, slot), place(blocks, t.blocks, gap), place(rows, t.rows, slot),
               place(rows, t.rows, gap));
    ++gap;
  }
}

inline void trim(const Trimming& t) {
  const int64_t segments = t.batch * t.heads;
#pragma omp parallel for schedule(static) if (segments * t.stored > 1 << 14)
  for (int64_t s = 0; s < segments; ++s) trim_segment(t, s / t.heads, s % t.heads);
}

}  // namespace kvsieve
