/* All that pillow-simd's image headers take from Python's: with it the resize compiles without Python's headers, and
the result works under any version of Python. */
#ifndef PYTHON_H_STAND_IN
#define PYTHON_H_STAND_IN

#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HAVE_PROTOTYPES 1
#define STDC_HEADERS 1

typedef ptrdiff_t Py_ssize_t;
typedef struct _object PyObject;

#endif
