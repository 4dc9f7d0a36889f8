// What the browser keeps: images with their settings, jobs that are not over, and the images in the form.

/** The stores of each database. A new store has a new database: an open tab of an older page would block an upgrade. */
const KEYS = { canvax: { images: "id", jobs: "once" }, "canvax-form": { inputs: "id" } };
const opened = {};

function open(database) {
  opened[database] ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(database, 1);
    request.onupgradeneeded = () => {
      for (const [name, keyPath] of Object.entries(KEYS[database])) request.result.createObjectStore(name, { keyPath });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened[database];
}

async function within(name, mode, act) {
  const database = await open(Object.keys(KEYS).find((one) => name in KEYS[one]));
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(name, mode);
    const request = act(transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

const kept = (name) => ({
  all: () => within(name, "readonly", (store) => store.getAll()),
  put: (record) => within(name, "readwrite", (store) => store.put(record)),
  delete: (id) => within(name, "readwrite", (store) => store.delete(id)),
});

export const images = kept("images");
export const unfinished = kept("jobs");
export const inputs = kept("inputs");

/** Also where randomUUID is missing, which wants https or localhost. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
