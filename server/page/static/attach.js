// Files that go with a message, as text or as images: chosen, pasted or dropped, read here, never
// sent by themselves.

import { h, iconButton } from './dom.js';

const MOST_FILES = 16;
const MOST_BYTES = 2 * 1024 * 1024;
const MOST_IMAGE_BYTES = 16 * 1024 * 1024;
const IMAGES = /^image\/(png|jpeg|webp|gif)$/;
/** Addresses of images that the page keeps and sends. */
export const IMAGE_URL = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;

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

/** An image's name and its data URL. Raises `Error` where it is too large. */
async function imageOf(file) {
  if (file.size > MOST_IMAGE_BYTES) throw new Error(`${file.name} is larger than 16 MiB.`);
  const image = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
  return { name: file.name.slice(0, 200), image };
}

/** An image of a file as it is shown. */
export function thumbnail({ name, image }) {
  return h('img', { class: 'thumbnail', src: image, alt: name, title: name });
}

/**
 * The files of the message that is being written: `button` adds some, `element` lists them.
 * `complain(text)` hears what could not be read. `takesImages`: whether images are sent as images.
 */
export class Attachments {
  constructor(complain) {
    this.complain = complain;
    this.takesImages = false;
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
        const isImage = this.takesImages && IMAGES.test(file.type);
        this.files.push(await (isImage ? imageOf(file) : textOf(file)));
      } catch (error) {
        this.complain(error.message);
      }
    }
    this.#draw();
  }

  /** Take files, such as screenshots, that are pasted into a field; text is pasted as always. */
  takePastes(field) {
    field.addEventListener('paste', (event) => {
      const files = [...event.clipboardData?.files ?? []];
      if (!files.length || event.clipboardData.types.includes('text/plain')) return;
      event.preventDefault();
      this.add(files);
    });
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
    this.element.replaceChildren(...this.files.map((file) => h('li', {},
      file.image ? thumbnail(file) : null, h('bdi', {}, file.name),
      iconButton('close', `Remove ${file.name}`, () => {
        this.files = this.files.filter((one) => one !== file);
        this.#draw();
      }))));
  }
}
