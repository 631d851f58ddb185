// What the browser keeps: conversations, their messages, images. Where it keeps nothing, as in some
// private windows, it is forgotten with the tab.

const NAME = 'piecework';
const VERSION = 1;
const STORES = {
  conversations: { index: 'updated' },
  messages: { index: 'conversation' },
  images: { index: 'created' },
};

const ofTab = new Map();
/** What a tab keeps by name, also where the browser lets it keep nothing. */
export const tab = {
  get(name) {
    try {
      return sessionStorage.getItem(name);
    } catch {
      return ofTab.get(name) ?? null;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(name, value);
    } catch {
      ofTab.set(name, value);
    }
  },
};

let opened = null;
/** Whether what is kept outlives the tab. */
export let isKept = true;

function database() {
  opened ??= new Promise((resolve) => {
    const forget = () => {
      isKept = false;
      resolve(new Memory());
    };
    let request;
    try {
      request = indexedDB.open(NAME, VERSION);
    } catch {
      forget();
      return;
    }
    request.onupgradeneeded = () => {
      for (const [name, { index }] of Object.entries(STORES)) {
        request.result.createObjectStore(name, { keyPath: 'id' }).createIndex(index, index);
      }
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(new Kept(request.result));
    };
    request.onerror = forget;
    request.onblocked = forget;
  });
  return opened;
}

class Kept {
  constructor(db) {
    this.db = db;
  }

  /** Run `work(store, done)` in a transaction; resolves once that is on disk. */
  run(name, mode, work) {
    return new Promise((resolve, reject) => {
      const transaction = this.db.transaction(name, mode);
      let result;
      work(transaction.objectStore(name), (value) => {
        result = value;
      });
      transaction.oncomplete = () => resolve(result);
      transaction.onabort = transaction.onerror = () => reject(
        transaction.error ?? new Error('The browser could not keep this.'));
    });
  }

  put(name, values) {
    return this.run(name, 'readwrite', (store) => values.forEach((value) => store.put(value)));
  }

  get(name, id) {
    return this.run(name, 'readonly', (store, done) => {
      store.get(id).onsuccess = (event) => done(event.target.result);
    });
  }

  delete(name, ids) {
    return this.run(name, 'readwrite', (store) => ids.forEach((id) => store.delete(id)));
  }

  /** All with this value of the index. */
  all(name, value) {
    return this.run(name, 'readonly', (store, done) => {
      const asked = store.index(STORES[name].index).getAll(value);
      asked.onsuccess = () => done(asked.result);
    });
  }

  /** Up to `count` that pass, the last of the index first. */
  last(name, count, passes) {
    return this.run(name, 'readonly', (store, done) => {
      const found = [];
      done(found);
      store.index(STORES[name].index).openCursor(null, 'prev').onsuccess = (event) => {
        const cursor = event.target.result;
        if (!cursor || found.length >= count) return;
        if (passes(cursor.value)) found.push(cursor.value);
        cursor.continue();
      };
    });
  }
}

class Memory {
  constructor() {
    this.stores = Object.fromEntries(Object.keys(STORES).map((name) => [name, new Map()]));
  }

  async put(name, values) {
    for (const value of values) this.stores[name].set(value.id, structuredClone(value));
  }

  async get(name, id) {
    return this.stores[name].get(id);
  }

  async delete(name, ids) {
    for (const id of ids) this.stores[name].delete(id);
  }

  async all(name, value) {
    return [...this.stores[name].values()].filter((one) => one[STORES[name].index] === value);
  }

  async last(name, count, passes) {
    const by = STORES[name].index;
    return [...this.stores[name].values()].sort((one, two) => two[by] - one[by]).filter(passes)
      .slice(0, count);
  }
}

export const put = async (name, ...values) => (await database()).put(name, values);
export const get = async (name, id) => (await database()).get(name, id);
export const remove = async (name, ...ids) => (await database()).delete(name, ids);
export const all = async (name, value) => (await database()).all(name, value);
export const last = async (name, count, passes = () => true) => (
  (await database()).last(name, count, passes));

/** Ids of conversations where a message or a file of one holds `sought`, in small letters. */
export async function conversationsWith(sought) {
  const ids = new Set();
  const holds = (text) => text?.toLowerCase().includes(sought);
  await last('messages', 1, (message) => {
    if (holds(message.text) || message.files?.some((file) => holds(file.text))) {
      ids.add(message.conversation);
    }
    return false;
  });
  return ids;
}

/** A conversation's messages. */
export const messagesOfConversation = (id) => all('messages', id);

export async function removeConversation(id) {
  const messages = await all('messages', id);
  await remove('messages', ...messages.map((message) => message.id));
  await remove('conversations', id);
}
