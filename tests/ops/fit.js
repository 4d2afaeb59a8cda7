// Measures the pages in the frames of this page, and replaces this page by their faults as JSON.
// A page is no wider than its window. Its code, and with `tablesScroll` unset its tables, are no wider than its content area.
// A word in a cell lies in one line; so does a name of 20 characters or less.
"use strict";

function misfits(frame) {
  const page = frame.contentDocument;
  const main = page.querySelector("main");
  if (!main || !page.styleSheets.length) return ["it did not load"];
  const found = [];
  if (page.documentElement.scrollWidth > frame.clientWidth) found.push(`the page: ${page.documentElement.scrollWidth}`);
  const kinds = tablesScroll ? "pre, code" : "pre, code, table";
  for (const element of main.querySelectorAll(kinds)) {
    if (tablesScroll && element.closest("table")) continue;
    const width = Math.round(Math.max(element.getBoundingClientRect().width, element.scrollWidth));
    if (width > main.clientWidth + 1)
      found.push(`${element.tagName} of ${width} in ${main.clientWidth} pixels: ${element.textContent.trim().slice(0, 40)}`);
  }
  for (const cell of main.querySelectorAll("td, th"))
    for (const word of words(page, cell)) if (lines(word) > 1) found.push(`broken word: ${word}`);
  return found;
}

function* words(page, cell) {
  const texts = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode()); )
    for (const pattern of [/[\p{L}\p{N}]+/gu, /(?<!\w)\w{1,20}(?!\w)/g])
      for (const word of text.data.matchAll(pattern)) {
        const range = page.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        yield range;
      }
}

function lines(word) {
  return new Set(Array.from(word.getClientRects(), (box) => Math.round(box.top))).size;
}

window.onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) found[frame.title] = misfits(frame);
  document.documentElement.textContent = JSON.stringify(found);
};
