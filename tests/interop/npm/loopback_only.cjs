// Preloaded into the emulators: neither of them has a setting for its address, and both would
// listen on every interface. Whatever a server asks for, it gets the loopback interface.
'use strict';
const { Server } = require('node:net');

const LOOPBACK = '127.0.0.1';
const listenAsAsked = Server.prototype.listen;

function isPort(value) {
  return typeof value === 'number' || (typeof value === 'string' && /^[0-9]+$/.test(value));
}

Server.prototype.listen = function listen(first, ...rest) {
  if (isPort(first)) {
    // listen(port[, host][, backlog][, callback]): the host is the only string that can follow.
    const others = rest.filter((argument) => typeof argument !== 'string');
    return listenAsAsked.call(this, Number(first), LOOPBACK, ...others);
  }
  if (first !== null && typeof first === 'object' && first.port !== undefined) {
    return listenAsAsked.call(this, { ...first, host: LOOPBACK }, ...rest);
  }
  return listenAsAsked.call(this, first, ...rest);
};
