/* The module of the kernels. The other files are parts of this one, so that the compiler can inline what they call. */

#include "_open_record.h"
#include "_md5_lanes.c"
#include "_delivery.c"
#include "_open_record.c"
#include "_put_pairs.c"
#include "_put_batch.c"
#include "_put_one.c"

static PyMethodDef functions[] = {
    {"append_pairs", append_pairs, METH_VARARGS, NULL},
    {"await_method", await_method, METH_O, NULL},
    {"count_forks", count_forks, METH_O, NULL},
    {"put_method", put_method, METH_O, NULL},
    {"plain_until", plain_until, METH_VARARGS, NULL},
    {"sealed", sealed, METH_O, NULL},
    {"use_outcomes", use_outcomes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_open_record", .m_doc = "open_record.py in C.", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__open_record(void)
{
    if (PyType_Ready(&KnownType) < 0 || begin_put_one() < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddType(module, &OpenRecordType) < 0 || PyModule_AddType(module, &RoomType) < 0 ||
        PyModule_AddType(module, &PutBatchType) < 0) Py_CLEAR(module);
    return module;
}
