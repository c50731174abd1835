/* User records put one by one, which wait in a batch to be put together. Decision 57 says why, and until when.

   Until then its deliveries share an outcome of its own. Then they get those of their aggregated records. If anything else
   has that outcome, or waits for it, the user records move from it as others do. */

static const double INSTANT = 0.001; /* seconds */

/* The arguments of a put, of which it takes the first TAKEN, and the others have a value that is the default. */
enum { STREAM, KEY, DATA, EXPLICIT, FLOW, TAKEN, TIER = TAKEN, METADATA, ARGUMENTS };

static PyMemberDef room_members[] = {
    {"free_records", T_PYSSIZET, offsetof(Room, free_records), 0, NULL},
    {"free_bytes", T_PYSSIZET, offsetof(Room, free_bytes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject RoomType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kpl_core.pipeline._open_record.Room",
    .tp_doc = "How many user records, and how many of their bytes, there is room for.",
    .tp_basicsize = sizeof(Room),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = room_members,
};

/* Where a user record of a batch is afterwards; NULL after an error. */
typedef struct {
    PyObject *outcome;
    Py_ssize_t index;
} Landing;

/* Keep the error that is set, if any, unless there was one before. */
static void keep_first(PyObject **error)
{
    PyObject *type, *raised, *trace;
    PyErr_Fetch(&type, &raised, &trace);
    PyErr_NormalizeException(&type, &raised, &trace);
    if (trace != NULL) PyException_SetTraceback(raised, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    if (*error == NULL) *error = raised;
    else Py_XDECREF(raised);
}

/* Raise a kept error, if there is one. Returns -1 then. */
static int raise_kept(PyObject *error)
{
    if (error == NULL) return 0;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return -1;
}

static void release(const BatchedPut *put)
{
    Py_DECREF(put->key);
    Py_DECREF(put->data);
    Py_DECREF(put->explicit);
    Py_DECREF(put->flow);
    Py_DECREF(put->delivery);
}

/* Ask whether each record may enter its lane, because none waits for the turn of its flow. Returns -1 with an error. */
static int ask_passes(PutBatch *self)
{
    PyObject *passes = PyObject_CallMethod(self->pipeline, "all_pass", NULL);
    self->passes = passes == Py_True;
    Py_XDECREF(passes);
    return passes == NULL ? -1 : self->passes;
}

/* Let the pipeline put a record that opens or closes an aggregated record, or may have to wait for the turn of its flow. If
   that fails, the record has failed, and all but a lack of memory is kept. */
static void place(PutBatch *self, const BatchedPut *put, PyObject *now, Landing *landing, PyObject **error)
{
    PyObject *handle = PyObject_CallMethod(self->pipeline, "place", "OOOOO", put->key, put->data, put->explicit, put->flow, now);
    if (handle == NULL) {
        PyObject *raised = NULL;
        keep_first(&raised);
        if (*error == NULL && !PyErr_GivenExceptionMatches(raised, PyExc_MemoryError)) *error = Py_NewRef(raised);
        handle = PyObject_CallMethod(self->pipeline, "fail_put", "OOOOOO", put->key, put->data, put->explicit, put->flow, now, raised);
        Py_DECREF(raised);
    }
    PyObject *index = handle == NULL ? NULL : PyObject_GetAttrString(handle, "index");
    if (index != NULL) *landing = (Landing){PyObject_GetAttrString(handle, "outcome"), PyLong_AsSsize_t(index)};
    Py_XDECREF(index);
    Py_XDECREF(handle);
    keep_first(error);
    Py_XDECREF(PyObject_CallMethod(self->pipeline, "attend", "O", now));
    keep_first(error);
    if (ask_passes(self) < 0) keep_first(error);
}

/* Hash the keys of these records, and find their open records. Returns the table of the router, NULL: it has none. */
static PyObject *read_puts(PutBatch *self, const BatchedPut *puts, int count, Pair *block, ShardTable *shards)
{
    PyObject *table = PyObject_GetAttrString(self->router, "table");
    if (table == NULL || !PyTuple_CheckExact(table) || !read_table(table, shards)) Py_CLEAR(table);
    PyErr_Clear();
    for (int each = 0; each < count; each++) {
        if (!read_record(puts[each].key, puts[each].data, puts[each].explicit, &block[each])) Py_CLEAR(table);
    }
    if (table != NULL) hash_and_find(block, count, shards);
    return table;
}

/* Put up to BLOCK records. The others follow an error too, because they were accepted; the first one is kept. */
static void put_block(PutBatch *self, const BatchedPut *puts, int count, PyObject *now, Landing *landings, PyObject **error)
{
    Pair block[BLOCK];
    ShardTable shards;
    PyObject *table = read_puts(self, puts, count, block, &shards);
    for (int each = 0; each < count; each++) {
        if (table != NULL && self->passes && append_pair(&block[each], now) > 0) {
            const OpenRecord *record = block[each].record;
            landings[each] = (Landing){Py_NewRef(record->outcome), PyList_GET_SIZE(record->arrivals) - 1};
            continue;
        }
        PyErr_Clear();
        place(self, &puts[each], now, &landings[each], error);
        /* It may have run any code. */
        if (table != NULL) find_records(block + each, count - each, &shards);
    }
    Py_XDECREF(table);
}

/* Give each delivery its outcome and index. If anything else has the outcome of the batch, or waits for it, tell those instead
   where its user records are. Returns 1 if the outcome of the batch is as before. */
static int land(PutBatch *self, const BatchedPut *puts, int count, PyObject *outcome, const Landing *landings, PyObject **error)
{
    PyObject *waiters = PyObject_GetAttrString(outcome, "waiters");
    int is_shared = Py_REFCNT(outcome) != count + 1 || waiters != Py_None;
    Py_XDECREF(waiters);
    for (int each = 0; each < count; each++) {
        const Landing *to = &landings[each];
        if (to->outcome == NULL) continue;
        if (is_shared) Py_XDECREF(PyObject_CallMethod(outcome, "move", "iOn", each, to->outcome, to->index));
        else if (Py_REFCNT(puts[each].delivery) > 1) set_delivery(&self->delivery, puts[each].delivery, to->outcome, to->index);
        if (PyErr_Occurred()) keep_first(error);
    }
    if (is_shared) Py_XDECREF(PyObject_CallMethod(outcome, "wake", NULL));
    keep_first(error);
    return !is_shared;
}

/* Put the records of the batch, if it has any. */
static void drain(PutBatch *self, PyObject **error)
{
    BatchedPut puts[BATCH];
    Landing landings[BATCH] = {0};
    PyObject *outcome = self->outcome, *now = self->now;
    int count = (int)self->count;
    if (count == 0) return;
    memcpy(puts, self->puts, count * sizeof(BatchedPut)); /* a hook may put meanwhile, into the next batch */
    self->outcome = self->now = NULL;
    self->count = self->bytes = 0;
    self->drains++;
    for (int start = 0; start < count; start += BLOCK)
        put_block(self, puts + start, count - start < BLOCK ? count - start : BLOCK, now, landings + start, error);
    int is_as_before = land(self, puts, count, outcome, landings, error);
    for (int each = 0; each < count; each++) {
        release(&puts[each]);
        Py_XDECREF(landings[each].outcome);
    }
    self->drains--;
    Py_DECREF(now);
    if (is_as_before && Py_REFCNT(outcome) == 1 && self->outcome == NULL) self->outcome = outcome; /* the next batch has it */
    else Py_DECREF(outcome);
}

/* Drain the batch for a producer, which wakes the stream if the pipeline wants that. Returns -1 with an error. */
static int drain_and_wake(PutBatch *self, PyObject *producer, PyObject *stream)
{
    PyObject *error = NULL;
    do {
        drain(self, &error);
    } while (self->count >= self->limit); /* hooks have put meanwhile */
    PyObject *attention = PyObject_GetAttrString(self->pipeline, "attention");
    if (attention == Py_True) Py_XDECREF(PyObject_CallMethod(producer, "_wake", "O", stream));
    Py_XDECREF(attention);
    keep_first(&error);
    return raise_kept(error);
}

/* Drain a batch that is older than an instant; begin one if the pipeline will be polled in time. 0: it will not. -1: error. */
static int prepare(PutBatch *self, PyObject *now, PyObject *producer, PyObject *stream)
{
    if (now == NULL) return 1;
    if (!PyFloat_CheckExact(now)) return 0;
    double at = PyFloat_AS_DOUBLE(now);
    if (self->count > 0 && at - PyFloat_AS_DOUBLE(self->now) > INSTANT && drain_and_wake(self, producer, stream) < 0) return -1;
    if (self->count > 0 || at < self->opens_at) return self->count > 0;
    int passes = ask_passes(self);
    if (passes <= 0) return passes;
    if (self->outcome == NULL) {
        PyObject *outcome = PyObject_CallMethod(self->pipeline, "new_outcome", NULL);
        if (outcome == NULL) return -1;
        if (self->outcome == NULL) self->outcome = outcome;
        else Py_DECREF(outcome); /* a signal handler has begun a batch meanwhile */
    }
    if (self->count == 0) Py_XSETREF(self->now, Py_NewRef(now));
    return 1;
}

/* Put a user record into the batch and return its delivery. `now` is NULL: soon after the one before, or in a thread, whose
   batch the loop drains: then no other code runs within it. NULL without an error: the method in Python does it. */
static PyObject *put_in_batch(PutBatch *self, PyObject *const *arguments, PyObject *now, PyObject *producer)
{
    PyObject *key = arguments[KEY], *data = arguments[DATA], *explicit = arguments[EXPLICIT], *flow = arguments[FLOW];
    unsigned char digest[DIGEST_BYTES];
    Room *room = self->room, *taken = self->taken;
    int is_queued = taken != room;
    if (!PyUnicode_CheckExact(key) || !PyUnicode_IS_COMPACT_ASCII(key) || !PyBytes_CheckExact(data)) return NULL;
    Py_ssize_t characters = PyUnicode_GET_LENGTH(key), size = characters + PyBytes_GET_SIZE(data);
    if (characters == 0 || characters > MOST_CHARACTERS || size > self->most) return NULL;
    if (explicit != Py_None && !read_hash_key(explicit, digest)) return NULL;
    if (flow != Py_None && !(self->takes_flows && PyUnicode_CheckExact(flow) && PyUnicode_IS_COMPACT_ASCII(flow))) return NULL;
    if (is_queued && (self->outcome == NULL || self->count >= self->limit || self->bytes + size > BATCH_BYTES)) return NULL;
    if (prepare(self, now, producer, arguments[STREAM]) <= 0) return NULL;
    if (room->free_records + is_queued * taken->free_records < 1) return NULL;
    if (room->free_bytes + is_queued * taken->free_bytes < size) return NULL;
    PyObject *delivery = new_delivery(&self->delivery, self->outcome, self->count);
    if (delivery == NULL) return NULL;
    __builtin_prefetch((char *)data + CACHE_LINE);
    __builtin_prefetch((char *)data + 2 * CACHE_LINE);
    self->puts[self->count++] = (BatchedPut){Py_NewRef(key), Py_NewRef(data), Py_NewRef(explicit), Py_NewRef(flow), Py_NewRef(delivery)};
    self->bytes += size;
    taken->free_records--;
    taken->free_bytes -= size;
    if (is_queued || (self->count < BATCH && self->count < self->limit && self->bytes < BATCH_BYTES)) return delivery;
    if (self->count < BATCH && self->drains > 0) return delivery; /* `drain_and_wake` above this call puts it too */
    if (drain_and_wake(self, producer, arguments[STREAM]) < 0) Py_CLEAR(delivery);
    return delivery;
}

/* Drain the batch. With a time, which one of the inbox has not, its records arrive then. */
static PyObject *drain_method(PutBatch *self, PyObject *const *given, Py_ssize_t count)
{
    PyObject *error = NULL;
    if (count > 0) Py_XSETREF(self->now, Py_NewRef(given[0]));
    if (count > 0 && ask_passes(self) < 0) keep_first(&error);
    drain(self, &error);
    return raise_kept(error) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *new_batch(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *pipeline, *router, *room, *delivery, *outcome = NULL, *taken = NULL;
    if (!PyArg_ParseTuple(arguments, "OOO!O|OO!", &pipeline, &router, &RoomType, &room, &delivery, &outcome, &RoomType, &taken))
        return NULL;
    PutBatch *self = (PutBatch *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->pipeline = Py_NewRef(pipeline);
    self->router = Py_NewRef(router);
    self->room = (Room *)Py_NewRef(room);
    self->taken = (Room *)Py_NewRef(taken == NULL ? room : taken);
    self->outcome = Py_XNewRef(outcome);
    self->opens_at = Py_HUGE_VAL;
    self->limit = BATCH;
    if (!read_class(delivery, &self->delivery)) Py_CLEAR(self);
    return (PyObject *)self;
}

static int traverse_batch(PutBatch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->pipeline);
    Py_VISIT(self->router);
    return 0;
}

static int clear_batch(PutBatch *self)
{
    while (self->count > 0) release(&self->puts[--self->count]);
    Py_CLEAR(self->pipeline);
    Py_CLEAR(self->router);
    return 0;
}

static void deallocate_batch(PutBatch *self)
{
    PyObject_GC_UnTrack(self);
    clear_batch(self);
    Py_XDECREF(self->room);
    Py_XDECREF(self->taken);
    Py_XDECREF(self->delivery.type);
    Py_XDECREF(self->outcome);
    Py_XDECREF(self->now);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef batch_methods[] = {{"drain", (PyCFunction)(void (*)(void))drain_method, METH_FASTCALL, NULL}, {0}};

static PyMemberDef batch_members[] = {
    {"bytes", T_PYSSIZET, offsetof(PutBatch, bytes), READONLY, NULL},
    {"count", T_PYSSIZET, offsetof(PutBatch, count), READONLY, NULL},
    {"limit", T_PYSSIZET, offsetof(PutBatch, limit), 0, NULL},
    {"most", T_PYSSIZET, offsetof(PutBatch, most), 0, NULL},
    {"opens_at", T_DOUBLE, offsetof(PutBatch, opens_at), 0, NULL},
    {"takes_flows", T_BOOL, offsetof(PutBatch, takes_flows), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject PutBatchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kpl_core.pipeline._open_record.PutBatch",
    .tp_doc = "User records of one stream that wait to be put together.",
    .tp_basicsize = sizeof(PutBatch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = new_batch,
    .tp_traverse = (traverseproc)traverse_batch,
    .tp_clear = (inquiry)clear_batch,
    .tp_dealloc = (destructor)deallocate_batch,
    .tp_methods = batch_methods,
    .tp_members = batch_members,
};
