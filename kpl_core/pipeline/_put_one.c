/* One put of most user records, in C: a method that replaces `Producer.put_nowait` in front of the same in Python.

   It takes a str key and bytes-like data for which there is room, in the producer's own event loop, however the arguments
   are spelt. A key that the router neither knows nor wants to remember is hashed here. It leaves everything else to the
   method in Python, before anything has changed. An error of the clock or of the memory is raised. */

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

/* The arguments of a put. The first NAMED are those that it takes, the others have a value that is the default. */
enum { STREAM, KEY, DATA, NAMED, TIER = NAMED, FLOW, EXPLICIT, METADATA, ARGUMENTS };
static const char *const argument_texts[] = {"stream", "partition_key", "data", "tier", "flow", "explicit_hash_key", "metadata"};
static PyObject *argument_names[ARGUMENTS], *entrance_name, *streams_name, *thread_name, *remembers_name, *table_name;

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

/* Say whether an event loop runs in this thread. With asyncio's loops this is cheaper than to ask for the running loop,
   for which asyncio asks the system for the process each time. Of other loops it is given what says whether they run, and
   their thread. */
static int runs_here(PyObject *loop, PyObject *of_thread)
{
    PyObject *thread = of_thread == Py_None ? PyObject_GetAttr(loop, thread_name) : Py_NewRef(of_thread);
    unsigned long ident = thread != NULL && PyLong_CheckExact(thread) ? PyLong_AsUnsignedLong(thread) : 0;
    Py_XDECREF(thread);
    int is_here = ident != 0 && ident == PyThread_get_thread_ident();
    if (is_here && of_thread != Py_None) {
        PyObject *runs = PyObject_CallNoArgs(loop);
        is_here = runs == Py_True;
        Py_XDECREF(runs);
    }
    PyErr_Clear();
    return is_here;
}

/* Append by the route of a known partition key: (lane, entry of the key, its bytes, open record). The result is that of
   `append_routed`. */
static OpenRecord *append_known(PyObject *route, PyObject *text, PyObject *data, Py_ssize_t most, PyObject *now, Py_ssize_t *size)
{
    if (!PyTuple_CheckExact(route) || PyTuple_GET_SIZE(route) != 4) return NULL;
    PyObject *entry = PyTuple_GET_ITEM(route, 1), *record = PyTuple_GET_ITEM(route, 3);
    Py_ssize_t key_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(route, 2));
    PyErr_Clear();
    if (!Py_IS_TYPE(record, &OpenRecordType) || !PyBytes_CheckExact(entry) || key_bytes < 0) return NULL;
    *size = key_bytes + PyBytes_GET_SIZE(data);
    Key key = {text, PyBytes_AS_STRING(entry), PyBytes_GET_SIZE(entry)};
    if (*size > most || append_one((OpenRecord *)record, key, NULL, data, *size, now) <= 0) return NULL;
    return (OpenRecord *)record;
}

/* Append by the hash of the key, unless the router wants to remember its route. */
static OpenRecord *append_unknown(PyObject *router, PyObject *text, PyObject *data, Py_ssize_t most, PyObject *now, Py_ssize_t *size)
{
    PyObject *remembers = PyObject_GetAttr(router, remembers_name);
    PyObject *table = remembers == Py_False ? PyObject_GetAttr(router, table_name) : NULL;
    PyErr_Clear();
    OpenRecord *record = NULL;
    if (table != NULL && PyTuple_CheckExact(table)) record = append_routed(table, text, data, most, now, size);
    Py_XDECREF(table);
    Py_XDECREF(remembers);
    return record;
}

/* Put a record through the entrance of its pipeline: (routes, router, Room, most bytes). NULL without an error: the method
   in Python does it. */
static PyObject *put_through(PyObject *entrance, PyObject *text, PyObject *data, PyObject *now)
{
    if (!PyTuple_CheckExact(entrance) || PyTuple_GET_SIZE(entrance) != 4 || PyTuple_GET_ITEM(entrance, 1) == Py_None) return NULL;
    PyObject *routes = PyTuple_GET_ITEM(entrance, 0);
    Room *room = (Room *)PyTuple_GET_ITEM(entrance, 2);
    Py_ssize_t most = PyLong_AsSsize_t(PyTuple_GET_ITEM(entrance, 3)), size;
    PyErr_Clear();
    if (!PyDict_CheckExact(routes) || !PyUnicode_CheckExact(text) || !PyBytes_CheckExact(data)) return NULL;
    if (!PyObject_TypeCheck((PyObject *)room, &RoomType) || room->free_records < 1) return NULL;
    if (room->free_bytes < most) most = room->free_bytes;
    PyObject *route = PyDict_GetItemWithError(routes, text);
    OpenRecord *record = route != NULL ? append_known(route, text, data, most, now, &size)
                                       : append_unknown(PyTuple_GET_ITEM(entrance, 1), text, data, most, now, &size);
    if (record == NULL) return NULL;
    room->free_records--;
    room->free_bytes -= size;
    return last_delivery(record);
}

/* Put a record of a producer's stream. `streams`: (loop, its thread, clock, pipelines by stream, forks when it was
   opened). */
static PyObject *put_into(PyObject *streams, PyObject *const *arguments)
{
    if (!PyTuple_CheckExact(streams) || PyTuple_GET_SIZE(streams) != 5 || !PyDict_CheckExact(PyTuple_GET_ITEM(streams, 3)) ||
        !PyUnicode_CheckExact(arguments[STREAM])) return NULL;
    int is_here = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(streams, 4)) == forks &&
                  runs_here(PyTuple_GET_ITEM(streams, 0), PyTuple_GET_ITEM(streams, 1));
    PyErr_Clear();
    if (!is_here) return NULL;
    /* First, because a clock of a test may run any code. */
    PyObject *now = PyObject_CallNoArgs(PyTuple_GET_ITEM(streams, 2)), *delivery = NULL;
    if (now == NULL) return NULL;
    PyObject *pipeline = PyDict_GetItemWithError(PyTuple_GET_ITEM(streams, 3), arguments[STREAM]);
    PyObject *entrance = pipeline == NULL ? NULL : PyObject_GetAttr(pipeline, entrance_name);
    PyErr_Clear();
    if (entrance != NULL) delivery = put_through(entrance, arguments[KEY], arguments[DATA], now);
    Py_XDECREF(entrance);
    Py_DECREF(now);
    return delivery;
}

/* Find stream, key and data among the arguments. Returns 0 if one is missing, or another one is not the default. */
static int read_arguments(PyObject *const *given, Py_ssize_t positional, PyObject *names, PyObject **arguments)
{
    if (positional > 2 || names == NULL) return 0;
    if (positional == 2) arguments[STREAM] = given[1];
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(names); each++) {
        PyObject *value = given[positional + each];
        int argument = 0;
        while (argument < ARGUMENTS && PyTuple_GET_ITEM(names, each) != argument_names[argument]) argument++;
        if (argument == ARGUMENTS) return 0;
        if (argument < NAMED) {
            if (arguments[argument] != NULL) return 0;
            arguments[argument] = value;
        } else if (argument == TIER) {
            if (!PyUnicode_CheckExact(value) || PyUnicode_CompareWithASCIIString(value, "normal") != 0) return 0;
        } else if (value != Py_None) return 0;
    }
    return arguments[STREAM] != NULL && arguments[KEY] != NULL && arguments[DATA] != NULL;
}

static PyObject *call_put(PyObject *callable, PyObject *const *given, size_t flags, PyObject *names)
{
    /* (producer, stream, partition_key=, data=, ...) */
    Py_ssize_t positional = PyVectorcall_NARGS(flags);
    PyObject *arguments[NAMED] = {NULL}, *own = NULL;
    if (positional >= 1 && read_arguments(given, positional, names, arguments)) {
        if (PyByteArray_CheckExact(arguments[DATA]) || PyMemoryView_Check(arguments[DATA]))
            arguments[DATA] = own = PyObject_CallOneArg((PyObject *)&PyBytes_Type, arguments[DATA]);
        PyObject *streams = own == NULL && PyErr_Occurred() ? NULL : PyObject_GetAttr(given[0], streams_name);
        PyErr_Clear();
        PyObject *delivery = streams == NULL ? NULL : put_into(streams, arguments);
        Py_XDECREF(streams);
        Py_XDECREF(own);
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
    remembers_name = PyUnicode_InternFromString("remembers");
    table_name = PyUnicode_InternFromString("table");
    if (entrance_name == NULL || streams_name == NULL || thread_name == NULL || remembers_name == NULL || table_name == NULL) return -1;
    for (int each = 0; each < ARGUMENTS; each++) {
        argument_names[each] = PyUnicode_InternFromString(argument_texts[each]);
        if (argument_names[each] == NULL) return -1;
    }
    return PyType_Ready(&RoomType) < 0 || PyType_Ready(&PutMethodType) < 0 ? -1 : 0;
}
