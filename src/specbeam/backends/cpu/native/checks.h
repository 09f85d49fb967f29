// The first error in the arguments of a call, as a text, or null.
#pragma once

#include "ahead.h"
#include "model.h"

namespace specbeam {

const char *wrong(const ModelConfig &);

// The first error in a configuration beside that of its encoder. Neither has an error by itself.
const char *wrong(const ModelConfig &, const ModelConfig &encoder);

// The first error in the numbers of a part beside the parts before it in its layer.
const char *wrong(const Part &, const Model &, const Layer &before);

// The first parameter that is missing or has a wrong shape.
const char *incomplete(const Model &);

// The first error in the segments or the wanted nodes of a pass.
const char *wrong(const Model &, const Cache &, const Segment *, int64_t count, const int64_t *wanted,
                  int64_t wanted_count);

// The first error in the ancestors of the nodes. The slot of an ancestor must hold a node of its position. An ancestor
// on the prefix may lack a slot if it lies before all windows of all nodes.
const char *wrong_ancestors(const Model &, const Cache &, const Segment *, int64_t count);

const char *wrong(const Choice &);

// The first error in segments that go on by themselves, about which the choice has the requests. The choice has no
// error.
const char *wrong(const Segment *, int64_t count, const Choice &, const Ahead *, int64_t passes);

}  // namespace specbeam
