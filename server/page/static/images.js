// The view of images: a prompt and how to draw it, and what was drawn, which the browser keeps.

import { getJson } from './api.js';
import { announce, copyButton, h, icon, iconButton, newId, saveFile } from './dom.js';
import { last, put, remove } from './store.js';

const A_PAGE = 24;
const FIELDS = [
  ['num_inference_steps', 'Steps', { min: '1', max: '1000' }, 'the pipeline’s'],
  ['guidance_scale', 'Guidance', { min: '0', step: '0.01' }, 'the pipeline’s'],
  ['seed', 'Seed', { min: '0' }, 'drawn'],
];
const SIZES = ['', '512x512', '768x768', '1024x1024', '1024x768', '768x1024', '1280x720'];

export class Images {
  constructor(models) {
    this.models = models;
    this.count = A_PAGE;
    this.urls = [];
    this.#build();
    this.refresh();
  }

  #build() {
    this.prompt = h('textarea', { rows: '3', id: 'image-prompt', required: true,
      placeholder: 'What is to be drawn' });
    this.negative = h('input', { type: 'text', id: 'image-negative' });
    this.size = h('input', { type: 'text', list: 'image-sizes', id: 'image-size',
      pattern: '[0-9]{1,5}x[0-9]{1,5}', placeholder: 'the pipeline’s',
      title: 'Such as 1024x768' });
    this.picker = h('select', { id: 'image-model' });
    this.number = h('input', { type: 'number', id: 'image-n', min: '1', max: '10', value: '1' });
    this.fields = Object.fromEntries(FIELDS.map(([name, , limits, placeholder]) => [name,
      h('input', { type: 'number', id: `image-${name}`, placeholder, ...limits })]));
    const field = (label, input) => h('div', { class: 'field' },
      h('label', { for: input.id }, label), input);
    this.pick = field('Model', this.picker);
    this.problem = h('p', { class: 'problem', role: 'alert' });
    this.progress = h('p', { class: 'note progress', hidden: true });
    this.button = h('button', { class: 'primary' }, 'Draw');
    this.gallery = h('ul', { class: 'gallery', 'aria-label': 'Images' });
    this.more = h('button', { type: 'button', hidden: true, onclick: () => {
      this.count += A_PAGE;
      this.refresh();
    } }, 'Show more');
    this.form = h('form', { onsubmit: (event) => {
      event.preventDefault();
      this.#toggle();
    } }, field('Prompt', this.prompt), field('Not wanted', this.negative),
    h('div', { class: 'fields' }, this.pick, field('Size', this.size),
      field('How many', this.number),
      ...FIELDS.map(([name, label]) => field(label, this.fields[name]))),
    h('datalist', { id: 'image-sizes' }, ...SIZES.filter(Boolean).map(
      (value) => h('option', { value }))),
    this.problem, h('div', { class: 'row' }, this.button, this.progress));
    this.element = h('div', { class: 'images' }, h('div', { class: 'page' },
      h('h1', {}, 'Images'), this.form, this.gallery, this.more));
  }

  /** Offer the models that draw, where there are several. */
  setModels() {
    const models = this.models();
    const chosen = this.picker.value;
    this.picker.replaceChildren(...models.map(({ id }) => h('option', { value: id }, id)));
    if (models.some(({ id }) => id === chosen)) this.picker.value = chosen;
    this.pick.hidden = models.length < 2;
  }

  /** Draw, or give up what is being drawn. */
  async #toggle() {
    if (this.controller) {
      this.controller.abort();
      return;
    }
    const body = this.#body();
    this.controller = new AbortController();
    this.problem.textContent = '';
    this.button.replaceChildren(icon('stop'), 'Stop');
    const clock = this.#clock(body.model ?? '');
    try {
      const answer = await getJson('v1/images/generations', { body,
        signal: this.controller.signal });
      await this.#keep(body, answer);
      this.problem.textContent = (answer.warnings ?? []).join(' ');
      announce(`${answer.data.length} images were drawn`);
    } catch (error) {
      if (!this.controller.signal.aborted) this.problem.textContent = error.message;
    } finally {
      clearInterval(clock);
      this.progress.hidden = true;
      this.button.replaceChildren('Draw');
      this.controller = null;
    }
    this.refresh();
  }

  #body() {
    const body = { prompt: this.prompt.value, n: Number(this.number.value) || 1,
      response_format: 'b64_json' };
    if (this.picker.value) body.model = this.picker.value;
    if (this.negative.value) body.negative_prompt = this.negative.value;
    if (this.size.value) body.size = this.size.value;
    for (const [name] of FIELDS) {
      if (this.fields[name].value !== '') body[name] = Number(this.fields[name].value);
    }
    return body;
  }

  /** How long it takes, how far it is, and who is before. */
  #clock(model) {
    const began = performance.now();
    let others = '';
    const draw = async () => {
      const seconds = Math.round((performance.now() - began) / 1000);
      this.progress.hidden = false;
      this.progress.textContent = `Drawing for ${seconds} s${others}`;
      try {
        const { stats, requests } = await getJson(`v1/status?model=${encodeURIComponent(model)}`);
        const drawn = requests.find(({ steps }) => steps);
        others = (drawn ? `, step ${drawn.step} of ${drawn.steps}` : '')
          + (stats.queued_requests ? `, ${stats.queued_requests} images wait` : '');
      } catch { /* the request itself will tell */ }
    };
    draw();
    return setInterval(draw, 1000);
  }

  async #keep(body, answer) {
    const now = Date.now();
    await put('images', ...answer.data.map((image, index) => ({
      id: newId(), created: now + index, prompt: body.prompt, seed: image.seed ?? null,
      size: answer.size ?? '', steps: body.num_inference_steps ?? null,
      blob: blobOf(image.b64_json, answer.output_format ?? 'png'),
    })));
  }

  async refresh() {
    const found = await last('images', this.count + 1);
    this.more.hidden = found.length <= this.count;
    for (const url of this.urls) URL.revokeObjectURL(url);
    this.urls = [];
    this.gallery.replaceChildren(...found.slice(0, this.count).map((image) => this.#figure(image)));
  }

  #figure(image) {
    const url = URL.createObjectURL(image.blob);
    this.urls.push(url);
    const [width, height] = image.size.split('x').map(Number);
    const facts = [image.size, image.steps && `${image.steps} steps`,
      image.seed !== null && `seed ${image.seed}`].filter(Boolean).join(' · ');
    return h('li', {}, h('figure', {},
      h('a', { href: url, target: '_blank', rel: 'noopener' }, h('img', {
        src: url, alt: image.prompt, width: width || null, height: height || null })),
      h('figcaption', {}, h('span', { class: 'asked' }, image.prompt),
        h('span', { class: 'note' }, facts),
        h('span', { class: 'row' },
          iconButton('save', 'Download', () => saveFile(nameOf(image), image.blob)),
          copyButton(() => image.prompt, 'Copy the prompt'),
          iconButton('again', 'Take its settings', () => this.#take(image)),
          iconButton('trash', 'Delete', async () => {
            await remove('images', image.id);
            this.refresh();
          })))));
  }

  #take(image) {
    this.prompt.value = image.prompt;
    this.size.value = image.size;
    this.fields.seed.value = image.seed ?? '';
    this.fields.num_inference_steps.value = image.steps ?? '';
    this.prompt.focus();
  }
}

function blobOf(base64, format) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: `image/${format}` });
}

function nameOf(image) {
  const words = image.prompt.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 40) || 'image';
  return `${words}-${image.seed ?? image.id}.${image.blob.type.split('/')[1]}`;
}
