/* One put of most user records, in C: a method that replaces `Producer.put_nowait` in front of the same in Python.

   It takes an ASCII key, bytes-like data for which there is room, and perhaps an explicit hash key and a flow, however they
   are spelt, into the batch of the stream: in the producer's own event loop, or in a thread. It leaves everything else to the
   method in Python, before anything has changed. An error of the clock or of the memory is raised. */

/* The names of the arguments, and of attributes. */
enum { OWN_STREAMS = ARGUMENTS, THREAD_ID, IS_STOPPED, NAMES };
static const char *const texts[] = {"stream", "partition_key", "data", "explicit_hash_key", "flow", "tier", "metadata",
                                    "_own_streams", "_thread_id", "is_stopped"};
static PyObject *interned[NAMES];

/* A forked child has the thread of its parent's event loop, but not the loop. */
static unsigned long forks;

static PyObject *count_forks(PyObject *Py_UNUSED(module), PyObject *more)
{
    return PyLong_FromUnsignedLong(forks += PyLong_AsUnsignedLong(more));
}

/* Say whether an event loop runs in this thread. Of asyncio's loops it is given the attributes, because that is cheaper than
   to ask for the running loop, for which asyncio asks the system for the process. Of others it is given what says whether
   they run, and their thread. */
static int runs_here(PyObject *loop, PyObject *of_thread)
{
    PyObject *thread = PyDict_CheckExact(loop) ? PyDict_GetItemWithError(loop, interned[THREAD_ID]) : of_thread;
    unsigned long ident = thread != NULL && PyLong_CheckExact(thread) ? PyLong_AsUnsignedLong(thread) : 0;
    int is_here = ident != 0 && ident == PyThread_get_thread_ident();
    if (is_here && thread == of_thread) {
        PyObject *runs = PyObject_CallNoArgs(loop);
        is_here = runs == Py_True;
        Py_XDECREF(runs);
    }
    if (!is_here) PyErr_Clear();
    return is_here;
}

/* Say whether threads may put: what may stop them does not, and no put waits for room. */
static int admits(PyObject *admission, PyObject *waiting)
{
    if (!PyDict_CheckExact(admission) || !PyDict_CheckExact(waiting) || PyDict_GET_SIZE(waiting) > 0) return 0;
    return PyDict_GetItem(admission, interned[IS_STOPPED]) == Py_False;
}

/* Return the step of the system's coarse clock, which is read much faster and moves every 1 to 10 ms; 0 without one. */
static int64_t coarse_step(void)
{
#ifdef CLOCK_MONOTONIC_COARSE
    struct timespec at;
    if (clock_gettime(CLOCK_MONOTONIC_COARSE, &at) == 0) return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
#endif
    return 0;
}

static PutBatch *batch_of(PyObject *batches, PyObject *stream)
{
    PyObject *batch = PyDict_GetItemWithError(batches, stream);
    if (batch == NULL) PyErr_Clear();
    return batch != NULL && Py_IS_TYPE(batch, &PutBatchType) ? (PutBatch *)Py_NewRef(batch) : NULL;
}

/* Put a record of a producer's stream. `streams`: (loop, its thread, clock, batches by stream, forks when it was opened,
   whether the clock is the system's, what returns the loop of a thread, the next tuple), or those of the inbox of threads:
   (attributes of what may stop puts, puts that wait for room, None, batches by stream, forks, None). NULL without an error:
   the method in Python does it. */
static PyObject *put_into(PyObject *streams, PyObject *producer, PyObject *const *arguments)
{
    if (!PyTuple_CheckExact(streams) || PyTuple_GET_SIZE(streams) < 6 || !PyDict_CheckExact(PyTuple_GET_ITEM(streams, 3)) ||
        !PyUnicode_CheckExact(arguments[STREAM])) return NULL;
    PyObject *clock = PyTuple_GET_ITEM(streams, 2), *stream = arguments[STREAM], *now = NULL, *delivery = NULL;
    if (PyLong_AsUnsignedLong(PyTuple_GET_ITEM(streams, 4)) != forks) return NULL;
    if (clock == Py_None && !admits(PyTuple_GET_ITEM(streams, 0), PyTuple_GET_ITEM(streams, 1))) return NULL;
    if (clock != Py_None && !runs_here(PyTuple_GET_ITEM(streams, 0), PyTuple_GET_ITEM(streams, 1))) {
        PyObject *running = PyTuple_GET_SIZE(streams) < 8 ? NULL : PyObject_CallNoArgs(PyTuple_GET_ITEM(streams, 6));
        Py_XDECREF(running);
        return running == Py_None ? put_into(PyTuple_GET_ITEM(streams, 7), producer, arguments) : NULL;
    }
    PutBatch *batch = batch_of(PyTuple_GET_ITEM(streams, 3), stream);
    int64_t step = PyTuple_GET_ITEM(streams, 5) == Py_True ? coarse_step() : 0;
    if (batch != NULL && clock != Py_None && (batch->count == 0 || step == 0 || step != batch->step)) {
        Py_DECREF(batch);
        if ((now = PyObject_CallNoArgs(clock)) == NULL) return NULL;
        /* Once more, because a clock of a test may run any code. */
        batch = batch_of(PyTuple_GET_ITEM(streams, 3), stream);
        if (batch != NULL) batch->step = step;
    }
    if (batch != NULL) delivery = put_in_batch(batch, arguments, now, producer);
    Py_XDECREF(batch);
    Py_XDECREF(now);
    return delivery;
}

/* Find what it takes among the arguments. Returns 0 if stream, key or data is missing, or another one is not the default. */
static int read_arguments(PyObject *const *given, Py_ssize_t positional, PyObject *names, PyObject **arguments)
{
    if (positional > 2 || names == NULL) return 0;
    if (positional == 2) arguments[STREAM] = given[1];
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(names); each++) {
        PyObject *value = given[positional + each];
        int argument = 0;
        while (argument < ARGUMENTS && PyTuple_GET_ITEM(names, each) != interned[argument]) argument++;
        if (argument == ARGUMENTS || (argument == STREAM && positional == 2)) return 0;
        if (argument < TAKEN) arguments[argument] = value;
        else if (argument == TIER) {
            if (!PyUnicode_CheckExact(value) || PyUnicode_CompareWithASCIIString(value, "normal") != 0) return 0;
        } else if (value != Py_None) return 0;
    }
    return arguments[STREAM] != NULL && arguments[KEY] != NULL && arguments[DATA] != NULL;
}

static PyObject *call_put(PyObject *callable, PyObject *const *given, size_t flags, PyObject *names)
{
    /* (producer, stream, partition_key=, data=, ...) */
    Py_ssize_t positional = PyVectorcall_NARGS(flags);
    PyObject *arguments[TAKEN] = {NULL, NULL, NULL, Py_None, Py_None}, *own = NULL;
    if (positional >= 1 && read_arguments(given, positional, names, arguments)) {
        if (PyByteArray_CheckExact(arguments[DATA]) || PyMemoryView_Check(arguments[DATA]))
            arguments[DATA] = own = PyObject_CallOneArg((PyObject *)&PyBytes_Type, arguments[DATA]);
        PyObject *streams = arguments[DATA] == NULL ? NULL : PyObject_GetAttr(given[0], interned[OWN_STREAMS]);
        if (streams == NULL) PyErr_Clear();
        PyObject *delivery = streams == NULL ? NULL : put_into(streams, given[0], arguments);
        Py_XDECREF(streams);
        Py_XDECREF(own);
        if (delivery != NULL || PyErr_Occurred()) return delivery;
    }
    return PyObject_Vectorcall(((PutMethod *)callable)->function, given, flags, names);
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

/* Nothing frees it: a class and its module live as long as the process. */
static PyTypeObject PutMethodType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kpl_core.pipeline._open_record.PutMethod",
    .tp_doc = "A method in C in front of one in Python.",
    .tp_basicsize = sizeof(PutMethod),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(PutMethod, vectorcall),
    .tp_descr_get = bind_method,
    .tp_getattro = attribute_of,
};

static PyObject *made_method(PyObject *function, vectorcallfunc vectorcall)
{
    PutMethod *self = PyObject_New(PutMethod, &PutMethodType);
    if (self == NULL) return NULL;
    self->vectorcall = vectorcall;
    self->function = Py_NewRef(function);
    return (PyObject *)self;
}

static PyObject *put_method(PyObject *Py_UNUSED(module), PyObject *function)
{
    return made_method(function, call_put);
}

static PyObject *await_method(PyObject *Py_UNUSED(module), PyObject *function)
{
    return made_method(function, call_await);
}

/* Prepare the types and names of this file. */
static int begin_put_one(void)
{
    for (int each = 0; each < NAMES; each++) {
        if ((interned[each] = PyUnicode_InternFromString(texts[each])) == NULL) return -1;
    }
    return PyType_Ready(&PutMethodType);
}
