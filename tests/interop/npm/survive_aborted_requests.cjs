// Preloaded into kinesalite: since node 16 a client that goes away in the middle of its request
// raises an error nobody there listens for, and the whole emulator dies of it. Only these three
// are forgiven; any other uncaught error still ends the process, loudly.
'use strict';

function clientWentAway(error) {
  return error && (error.code === 'ECONNRESET' || error.code === 'EPIPE' || error.message === 'aborted');
}

process.on('uncaughtException', (error) => {
  if (!clientWentAway(error)) {
    console.error(error);
    process.exit(1);
  }
});
