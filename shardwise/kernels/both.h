/* Includes the file named by BODY twice, for float and for double, after the types and functions that it is written in.
 *
 * BODY says REAL for the element, NAME(x) for a symbol with the type's suffix, and uses what vector.h declares.
 */
#define JOIN(a, b) a##b
#define PASTE(a, b) JOIN(a, b)
#define NAME(x) PASTE(x, SUFFIX)

#define REAL float
#define SUFFIX _f32
#define IS_FLOAT 1
#include "vector.h"
#include BODY
#undef REAL
#undef SUFFIX
#undef IS_FLOAT

#define REAL double
#define SUFFIX _f64
#define IS_FLOAT 0
#include "vector.h"
#include BODY
