// Files that go with a message as text: chosen or dropped, read here, never sent by themselves.

import { h, iconButton } from './dom.js';

const MOST_FILES = 16;
const MOST_BYTES = 2 * 1024 * 1024;

/** A file's name and text. Raises `Error` where it is too large or no text. */
export async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than 2 MiB.`);
  let text;
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not text in UTF-8.`);
  }
  if (text.includes('\0')) throw new Error(`${file.name} is not text.`);
  return { name: file.name.slice(0, 200), text: text.replaceAll('\r\n', '\n') };
}

/**
 * The files of the message that is being written: `button` adds some, `element` lists them.
 * `complain(text)` hears what could not be read.
 */
export class Attachments {
  constructor(complain) {
    this.complain = complain;
    this.files = [];
    this.element = h('ul', { class: 'files', 'aria-label': 'Attached files', hidden: true });
    const input = h('input', { type: 'file', multiple: true, hidden: true,
      'aria-label': 'Files to attach', onchange: async () => {
        const files = [...input.files];
        input.value = '';
        await this.add(files);
      } });
    this.button = h('span', {}, iconButton('clip', 'Attach files', () => input.click()), input);
  }

  async add(files) {
    for (const file of files) {
      try {
        if (this.files.length >= MOST_FILES) throw new Error(`At most ${MOST_FILES} files.`);
        this.files.push(await textOf(file));
      } catch (error) {
        this.complain(error.message);
      }
    }
    this.#draw();
  }

  /** Take what is dropped on an element. */
  takeDrops(element) {
    const hasFiles = (event) => event.dataTransfer?.types.includes('Files');
    element.addEventListener('dragover', (event) => {
      if (hasFiles(event)) event.preventDefault();
    });
    element.addEventListener('drop', (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  /** The files, which are then no longer here. */
  take() {
    const { files } = this;
    this.files = [];
    this.#draw();
    return files;
  }

  #draw() {
    this.element.hidden = !this.files.length;
    this.element.replaceChildren(...this.files.map((file) => h('li', {}, h('bdi', {}, file.name),
      iconButton('close', `Remove ${file.name}`, () => {
        this.files = this.files.filter((one) => one !== file);
        this.#draw();
      }))));
  }
}
