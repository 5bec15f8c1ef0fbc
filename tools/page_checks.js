// Everything that is wrong with the page in sight, as sentences. tools/screenshots.py puts in WIDTH and SMALLEST.
(async () => {
  const wrong = [], width = WIDTH, smallest = SMALLEST, narrow = width < 600;
  const seen = element => element.checkVisibility({opacityProperty: true, visibilityProperty: true});
  const named = element => element.tagName.toLowerCase() + (element.id ? '#' + element.id : '') +
    (element.classList.length ? '.' + element.classList[0] : '') + ' "' + element.textContent.trim().slice(0, 40) + '"';
  await document.fonts.ready;

  const page = document.documentElement;
  if (page.scrollWidth > width) {
    const scrolls = '.scroll, .md-typeset__scrollwrap';
    const beyond = [...document.querySelectorAll('main *, article *')].filter(each =>
      seen(each) && each.getBoundingClientRect().right > width + 1 && !each.closest(scrolls));
    wrong.push('it is ' + page.scrollWidth + ' px wide: ' + beyond.slice(0, 3).map(named).join(', '));
  }

  // A table that scrolls hides its last columns, which have the answers.
  for (const wrap of document.querySelectorAll('.md-typeset__scrollwrap'))
    if (seen(wrap) && wrap.scrollWidth > wrap.clientWidth + 1)
      wrong.push('a table of ' + wrap.scrollWidth + ' px in ' + wrap.clientWidth + ': ' + named(wrap));

  for (const code of document.querySelectorAll('pre > code'))
    if (seen(code) && code.scrollWidth > code.clientWidth + 1) wrong.push('code is cut off: ' + named(code));

  const range = document.createRange();
  for (const cell of document.querySelectorAll('th')) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let text; (text = texts.nextNode());)
      for (const word of narrow && text.parentElement.closest('code') ? [] : text.data.matchAll(/[A-Za-z]+/g)) {
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
        if (lines.size > 1) wrong.push('a word of a header is broken: ' + word[0]);
      }
  }

  if (narrow) {
    for (const text of document.querySelectorAll('svg text')) {
      const size = parseFloat(getComputedStyle(text).fontSize) * Math.abs(text.getScreenCTM().d);
      if (seen(text) && text.textContent.trim() && size < smallest)
        wrong.push('text of ' + size.toFixed(1) + ' px: ' + named(text));
    }
    for (const image of document.querySelectorAll('img[src*=".svg"]')) {
      const text = await (await fetch(image.src)).text();
      const svg = new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
      if (!svg.querySelector('text')) continue;
      const drawn = svg.viewBox.baseVal.width || parseFloat(svg.getAttribute('width'));
      // As in font-size="12", font-size: 12px and font: bold 12px sans-serif.
      const sizes = text.matchAll(/(?:font-size\s*[:=]\s*"?|font:[^;{}"]*?)(\d+(?:\.\d+)?)(?:px|")/g);
      const size = Math.min(...[...sizes].map(match => +match[1])) * image.getBoundingClientRect().width / drawn;
      if (!(size >= smallest)) wrong.push('text of ' + size.toFixed(1) + ' px in ' + image.src);
    }
  }
  for (const image of document.images)
    if (!image.naturalWidth) wrong.push('a picture is missing: ' + image.src);

  // The color of text over the colors behind it, as 8-bit numbers.
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  canvas.canvas.width = canvas.canvas.height = 1;
  const over = colors => {
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = color => {
    const [r, g, b] = color.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // What lies behind an element, from the page to itself.
  const backgrounds = new Map([[null, []]]);
  const behind = element => {
    if (!backgrounds.has(element)) {
      const color = getComputedStyle(element).backgroundColor, others = behind(element.parentElement);
      backgrounds.set(element, color === 'rgba(0, 0, 0, 0)' ? others : [...others, color]);
    }
    return backgrounds.get(element);
  };
  const known = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; !narrow && (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest('script, style, .headerlink, .md-search') || !seen(element)) continue;
    const style = getComputedStyle(element), color = element.closest('svg') ? style.fill : style.color;
    const key = [color, ...behind(element)].join();
    if (!known.has(key)) {
      const back = light(over(['#fff', ...behind(element)])), front = light(over(['#fff', ...behind(element), color]));
      known.set(key, (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05));
    }
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
    const shape = element.matches('.mark');  // a cross or a triangle in a picture
    if (known.get(key) < (large || shape ? 3 : 4.5)) {
      wrong.push('a contrast of ' + known.get(key).toFixed(2) + ': ' + named(element) + ' ' + color);
      known.set(key, 99);  // said once
    }
  }
  return {wrong, height: page.scrollHeight};
})()
