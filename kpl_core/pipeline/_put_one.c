/* One put of most user records, in C: a method that replaces `Producer.put_nowait` in front of the same in Python.

   It takes a str key and bytes with a known route, for which there is room, in the producer's own event loop. It leaves
   everything else to the method in Python, before anything has changed. An error of the clock or of the memory is raised. */

#include "_open_record.h"
#include <stddef.h>
#include <structmember.h>

/* What is free for normal user records: the base of `BufferLimit`, whose numbers Python code changes too. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t free_records, free_bytes;
} Room;

static PyMemberDef room_members[] = {
    {"free_records", T_PYSSIZET, offsetof(Room, free_records), 0, NULL},
    {"free_bytes", T_PYSSIZET, offsetof(Room, free_bytes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject RoomType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kpl_core.pipeline._open_record.Room",
    .tp_doc = "How many user records, and how many of their bytes, there is room for.",
    .tp_basicsize = sizeof(Room),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = room_members,
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function; /* the method in Python */
} PutMethod;

static PyObject *entrance_name, *streams_name, *thread_name, *key_name, *data_name;

/* A forked child has the thread of its parent's event loop, but not the loop. */
static unsigned long forks;

PyObject *fork_count(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromUnsignedLong(forks);
}

PyObject *forked(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromUnsignedLong(++forks);
}

/* Say whether an event loop runs in this thread: with asyncio's loops this is cheaper than to ask for the running loop,
   for which asyncio asks the system for the process each time. */
static int runs_here(PyObject *loop)
{
    PyObject *thread = PyObject_GetAttr(loop, thread_name);
    unsigned long ident = thread != NULL && PyLong_CheckExact(thread) ? PyLong_AsUnsignedLong(thread) : 0;
    Py_XDECREF(thread);
    PyErr_Clear();
    return ident != 0 && ident == PyThread_get_thread_ident();
}

/* Return the open record of a partition key and its entry, or NULL. */
static OpenRecord *record_of(PyObject *routes, PyObject *text, Key *key, Py_ssize_t *key_bytes)
{
    PyObject *route = PyUnicode_CheckExact(text) && PyDict_CheckExact(routes) ? PyDict_GetItemWithError(routes, text) : NULL;
    if (route == NULL || !PyTuple_CheckExact(route) || PyTuple_GET_SIZE(route) != 4) return NULL;
    PyObject *entry = PyTuple_GET_ITEM(route, 1), *record = PyTuple_GET_ITEM(route, 3);
    if (!Py_IS_TYPE(record, &OpenRecordType) || !PyBytes_CheckExact(entry)) return NULL;
    *key = (Key){text, PyBytes_AS_STRING(entry), PyBytes_GET_SIZE(entry)};
    *key_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(route, 2));
    return (OpenRecord *)record;
}

/* Put a record through the entrance of its pipeline: (routes, Room, most bytes). NULL without an error: the method in
   Python does it. */
static PyObject *put_through(PyObject *entrance, PyObject *text, PyObject *data, PyObject *now)
{
    Key key;
    Py_ssize_t key_bytes;
    if (!PyTuple_CheckExact(entrance) || PyTuple_GET_SIZE(entrance) != 3 || !PyBytes_CheckExact(data)) return NULL;
    Room *room = (Room *)PyTuple_GET_ITEM(entrance, 1);
    if (!PyObject_TypeCheck((PyObject *)room, &RoomType)) return NULL;
    OpenRecord *record = record_of(PyTuple_GET_ITEM(entrance, 0), text, &key, &key_bytes);
    Py_ssize_t most = PyLong_AsSsize_t(PyTuple_GET_ITEM(entrance, 2)), size;
    PyErr_Clear();
    if (record == NULL || key_bytes < 0) return NULL;
    size = key_bytes + PyBytes_GET_SIZE(data);
    if (size > most || room->free_records < 1 || room->free_bytes < size) return NULL;
    if (append_one(record, key, NULL, data, size, now) <= 0) return NULL;
    room->free_records--;
    room->free_bytes -= size;
    return last_delivery(record);
}

/* Put a record of a producer's stream. `streams`: (loop, clock, pipelines by stream, forks when it was opened). */
static PyObject *put_into(PyObject *streams, PyObject *stream, PyObject *text, PyObject *data)
{
    if (!PyTuple_CheckExact(streams) || PyTuple_GET_SIZE(streams) != 4 || !PyDict_CheckExact(PyTuple_GET_ITEM(streams, 2)) ||
        !PyUnicode_CheckExact(stream)) return NULL;
    int is_here = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(streams, 3)) == forks && runs_here(PyTuple_GET_ITEM(streams, 0));
    PyErr_Clear();
    if (!is_here) return NULL;
    /* First, because a clock of a test may run any code. */
    PyObject *now = PyObject_CallNoArgs(PyTuple_GET_ITEM(streams, 1)), *delivery = NULL;
    if (now == NULL) return NULL;
    PyObject *pipeline = PyDict_GetItemWithError(PyTuple_GET_ITEM(streams, 2), stream);
    PyObject *entrance = pipeline == NULL ? NULL : PyObject_GetAttr(pipeline, entrance_name);
    PyErr_Clear();
    if (entrance != NULL) delivery = put_through(entrance, text, data, now);
    Py_XDECREF(entrance);
    Py_DECREF(now);
    return delivery;
}

static PyObject *call_put(PyObject *callable, PyObject *const *given, size_t flags, PyObject *names)
{
    /* (producer, stream, partition_key=, data=) */
    if (PyVectorcall_NARGS(flags) == 2 && names != NULL && PyTuple_GET_SIZE(names) == 2 &&
        PyTuple_GET_ITEM(names, 0) == key_name && PyTuple_GET_ITEM(names, 1) == data_name) {
        PyObject *streams = PyObject_GetAttr(given[0], streams_name);
        PyErr_Clear();
        PyObject *delivery = streams == NULL ? NULL : put_into(streams, given[1], given[2], given[3]);
        Py_XDECREF(streams);
        if (delivery != NULL || PyErr_Occurred()) return delivery;
    }
    return PyObject_Vectorcall(((PutMethod *)callable)->function, given, flags, names);
}

static PyObject *new_method(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *function;
    if (!PyArg_ParseTuple(arguments, "O", &function)) return NULL;
    PutMethod *self = (PutMethod *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = call_put;
    self->function = Py_NewRef(function);
    return (PyObject *)self;
}

static int traverse_method(PutMethod *self, visitproc visit, void *arg)
{
    Py_VISIT(self->function);
    return 0;
}

static int clear_method(PutMethod *self)
{
    Py_CLEAR(self->function);
    return 0;
}

static void deallocate_method(PutMethod *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->function);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *bind_method(PyObject *self, PyObject *producer, PyObject *Py_UNUSED(type))
{
    return producer == NULL || producer == Py_None ? Py_NewRef(self) : PyMethod_New(self, producer);
}

/* Name, text, signature and all else are those of the method in Python. */
static PyObject *attribute_of(PyObject *self, PyObject *name)
{
    if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return Py_NewRef(Py_TYPE(self));
    if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(((PutMethod *)self)->function);
    return PyObject_GetAttr(((PutMethod *)self)->function, name);
}

PyTypeObject PutMethodType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kpl_core.pipeline._open_record.PutMethod",
    .tp_doc = "A decorator of `put_nowait`.",
    .tp_basicsize = sizeof(PutMethod),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = new_method,
    .tp_traverse = (traverseproc)traverse_method,
    .tp_clear = (inquiry)clear_method,
    .tp_dealloc = (destructor)deallocate_method,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(PutMethod, vectorcall),
    .tp_descr_get = bind_method,
    .tp_getattro = attribute_of,
};

/* Prepare the types and names of this file. */
int begin_put_one(void)
{
    entrance_name = PyUnicode_InternFromString("entrance");
    streams_name = PyUnicode_InternFromString("_own_streams");
    thread_name = PyUnicode_InternFromString("_thread_id");
    key_name = PyUnicode_InternFromString("partition_key");
    data_name = PyUnicode_InternFromString("data");
    if (data_name == NULL || key_name == NULL || thread_name == NULL || streams_name == NULL || entrance_name == NULL) return -1;
    return PyType_Ready(&RoomType) < 0 || PyType_Ready(&PutMethodType) < 0 ? -1 : 0;
}
