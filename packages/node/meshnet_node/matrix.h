/* A matrix in columns (column_layout.py): what one input gives to 64 outputs, or two of 16 bits, lies together. */

typedef struct {
    const void *weight, *bias; /* bias may be null */
    int in, out, way;          /* in: a multiple of 4; out: of 64 */
} matrix;
