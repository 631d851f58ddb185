// Coloured code, by highlight.js, which is loaded with the first code of a language.

import { h } from './dom.js';

const MOST_TEXT = 50_000;
const PARTS = /<span class="([^"]*)">|<\/span>|[^<]+/g;
const ENTITIES = { '&amp;': '&', '&lt;': '<', '&gt;': '>', '&quot;': '"', '&#x27;': "'" };
let loading = null;
let library = null;

/** Load highlight.js; resolves to whether it is there. */
export function loadColours() {
  loading ??= import('./highlight.min.js').then((module) => {
    library = module.default;
    return true;
  }).catch(() => {
    loading = null;
    return false;
  });
  return loading;
}

/** Give `take` the chunks of coloured code, now or once they can be made; never for others. */
export function colour(text, language, lines, take) {
  if (!language || text.length > MOST_TEXT) return;
  const make = () => {
    if (library.getLanguage(language)) take(chunksOf(text, language, lines));
  };
  if (library) make();
  else loadColours().then((loaded) => loaded && make());
}

/** Elements of so many lines each. What the library writes is spans and text, and read as such. */
function chunksOf(text, language, lines) {
  const { value } = library.highlight(text, { language, ignoreIllegals: true });
  const chunks = [];
  let open = [];
  let count = 0;
  const put = (words) => {
    if (count % lines === 0 && (!chunks.length || chunks.at(-1).end === count)) begin();
    open.at(-1).append(words);
  };
  const begin = () => {
    const names = open.slice(1).map((element) => element.className);
    open = [h('span', { class: 'chunk' })];
    chunks.push({ element: open[0], end: count + lines });
    for (const name of names) enter(name);
  };
  const enter = (name) => {
    const element = h('span', { class: name });
    open.at(-1)?.append(element);
    open.push(element);
  };
  begin();
  for (const [part, name] of value.matchAll(PARTS)) {
    if (name !== undefined) {
      enter(name);
    } else if (part === '</span>') {
      open.pop();
    } else {
      const words = part.replace(/&(?:amp|lt|gt|quot|#x27);/g, (found) => ENTITIES[found]);
      for (const line of words.match(/[^\n]*\n|[^\n]+/g)) {
        put(line);
        if (line.endsWith('\n')) count += 1;
      }
    }
  }
  return chunks.map(({ element }) => element);
}
