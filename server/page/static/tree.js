// A conversation is a tree of messages: an edit or a new answer is a branch beside the old one, and
// `chosen` says which branch is shown.

/**
 * `info`: `{id, title, created, updated, system, chosen}`; `nodes`: id to `{id, conversation,
 * parent, role, text, ...}`, whose parent is null at the top. `chosen`: a node's id, or `top`, to
 * the child that is shown.
 */
export class Tree {
  constructor(info, nodes = []) {
    this.info = info;
    this.nodes = new Map(nodes.map((node) => [node.id, node]));
    this.children = new Map();
    for (const node of [...nodes].sort((one, two) => one.created - two.created)) {
      this.#enter(node);
    }
  }

  #enter(node) {
    const key = node.parent ?? 'top';
    if (!this.children.has(key)) this.children.set(key, []);
    this.children.get(key).push(node.id);
  }

  /** Add a node, and show its branch. */
  add(node) {
    this.nodes.set(node.id, node);
    this.#enter(node);
    this.info.chosen[node.parent ?? 'top'] = node.id;
  }

  /** A node and those beside it: `{ids, index}`. */
  siblings(node) {
    const ids = this.children.get(node.parent ?? 'top') ?? [node.id];
    return { ids, index: ids.indexOf(node.id) };
  }

  /** Show the sibling that is `step` further. */
  choose(node, step) {
    const { ids, index } = this.siblings(node);
    const next = ids[index + step];
    if (next) this.info.chosen[node.parent ?? 'top'] = next;
  }

  /** The nodes that are shown, the first one first; up to `node` where it is given. */
  path(until = null) {
    if (until) {
      const back = [];
      for (let node = until; node; node = this.nodes.get(node.parent)) back.push(node);
      return back.reverse();
    }
    const shown = [];
    for (let key = 'top'; ;) {
      const ids = this.children.get(key);
      if (!ids) return shown;
      const chosen = this.info.chosen[key];
      key = ids.includes(chosen) ? chosen : ids.at(-1);
      shown.push(this.nodes.get(key));
    }
  }
}

/** Text in a fence that is longer than any in it. */
export function fenced(text, language = '') {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([run]) => run.length));
  const fence = '`'.repeat(longest + 1);
  return `${fence}${language}\n${text.replace(/\n$/, '')}\n${fence}`;
}

/** A message's text, behind its files. Images are told by their names. */
export function contentOf(node) {
  const files = (node.files ?? []).map(({ name, text, image }) => (
    image ? `(image: ${name})` : `File: ${name}\n${fenced(text)}`));
  return [...files, node.text].filter((part) => part !== '').join('\n\n');
}

/** The content of a message for the API: text, or parts where it has images. */
function partsOf(node) {
  const images = (node.files ?? []).filter(({ image }) => image);
  if (!images.length) return contentOf(node);
  const text = contentOf({ ...node, files: node.files.filter(({ image }) => !image) });
  return [
    ...images.map(({ image }) => ({ type: 'image_url', image_url: { url: image } })),
    ...(text ? [{ type: 'text', text }] : []),
  ];
}

/** What the API is sent for these nodes; images by their names if the model does not read them. */
export function messagesOf(nodes, system, takesImages = false) {
  const messages = system ? [{ role: 'system', content: system }] : [];
  for (const node of nodes) {
    if (node.role === 'assistant') {
      const calls = (node.calls ?? []).map((call) => ({
        id: call.id, type: 'function', function: { name: call.name, arguments: call.arguments },
      }));
      messages.push({ role: 'assistant', content: node.text,
        ...(calls.length ? { tool_calls: calls } : {}) });
    } else if (node.role === 'tool') {
      messages.push({ role: 'tool', tool_call_id: node.call, content: node.text });
    } else {
      messages.push({ role: node.role, content: (takesImages ? partsOf : contentOf)(node) });
    }
  }
  return messages;
}

/** A conversation's title, from what was asked first. */
export function titleOf(text) {
  const line = text.trim().split('\n', 1)[0].slice(0, 200).replace(/\s+/g, ' ');
  return line.length > 60 ? `${line.slice(0, 57)}…` : line || 'New conversation';
}
