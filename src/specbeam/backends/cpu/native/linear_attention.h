// Linear attention with decays, over trees. A head's state S [key_dim, value_dim] after a node is
//
//   S = e^g S_parent + k u^T, and the node's output is S^T q.
//
// In the gated delta rule (Yang et al. 2024), u = beta (v - e^g S_parent^T k). In Mamba 2 (Dao and Gu 2024), u = beta
// v. A state takes megabytes per node, so no node has one. A node leaves the row (k, u, g), as it leaves keys and
// values for attention. A state is made at borders alone, which are multiples of BORDER positions. A node reads the
// state at the last border that is at least LAG positions before it, and the rows from there on:
//
//   S_parent^T x = e^(sum of g) S_border^T x + sum over rows i of e^(sum of later g) (k_i . x) u_i.
//
// The border depends on the position alone, a state is made of the one before by BORDER rows at once, and rows are
// added in the order of their positions. So no bit depends on the pieces of a prompt, on other nodes, or on when a
// state was made. Beams and drafts read one state together, because they nearly always share the nodes before the last
// LAG.
#pragma once

#include <algorithm>

#include "model.h"

namespace specbeam {

struct Pass;

constexpr int64_t BORDER = 16, LAG = 16;  // positions
inline int64_t border_of(int64_t position) { return std::max<int64_t>(0, position - LAG) / BORDER * BORDER; }

struct LinearHeads {
  int64_t num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0;
  // Value head h reads key head h % num_key_heads, and not the one whose group it is in.
  Flag tiled = NO;
  Flag delta_rule = YES;  // a node takes what the state has at its key from its value

  int64_t key_size() const { return num_key_heads * key_dim; }
  int64_t value_size() const { return num_value_heads * value_dim; }
  int64_t key_head(int64_t h) const { return tiled ? h % num_key_heads : h / (num_value_heads / num_key_heads); }
  // A row has all keys, all u, and the decays.
  int64_t row_size() const { return key_size() + value_size() + padded(num_value_heads); }
  int64_t state_size() const { return num_value_heads * key_dim * value_dim; }
  const char *wrong() const;  // the first error in the sizes, or null
};

// How long what linear attention keeps is read. The rows reach as far as any node that makes a state needs them.
inline Lifetime rows_lifetime() { return {LAG + 2 * BORDER, 1, 0, false}; }
// The state of a border is the row of the last position before it. The first node that reads it makes it of the state
// before.
inline Lifetime states_lifetime() { return {LAG + BORDER + 2, BORDER, LAG + 1, false}; }

// What a part keeps.
struct LinearMemory {
  Rows rows, states;   // [row_size], [state_size]
  int64_t row_region;  // of the cache
};

// What a part gives for each node of a pass: [nodes, stride]. decays: g of each value head; betas: likewise
struct LinearInputs {
  const float *queries, *keys, *values, *decays, *betas;
  int64_t stride;
};

// A state that nodes of a pass read, or that is made for later passes.
struct Border {
  int64_t position, slot;  // slot: of the last node before it; NO_SLOT at the start of a sequence, where S is 0
  int64_t node;            // one behind it
  int64_t first, end;      // its readers in Borders::readers, ancestors first
  int64_t row = NO_ROW;    // of the state; NO_ROW if only this pass needs it
  // Of a state that this pass makes: it begins as that of another border, or as a row, or with zeros, and moves on over
  // the positions from `begin` to its own.
  bool made = false;
  int64_t before = -1, before_row = NO_ROW, begin = 0;
  int64_t last_user = -1;  // the last border that begins as this one
  int64_t place = -1;      // of a state without a row, among such states
};

struct Borders {
  std::vector<Border> all;  // by their positions
  std::vector<int64_t> readers;
  int64_t places = 0;  // of states without rows
};

// Finds the states that the nodes of a pass read, and decides how those are made that are not there. region: with the
// states
void find_borders(const Pass &, int64_t region, Borders &);

// The outputs of all nodes. out: [nodes, value_size]
void attend_linearly(Pass &, const LinearHeads &, const LinearMemory &, const LinearInputs &, float *out);

}  // namespace specbeam
