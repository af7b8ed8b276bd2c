// What a page needs for a keyboard and a screen reader, and the theme leaves out.
function complete() {
  for (const nav of document.querySelectorAll("nav.md-code__nav")) nav.role = "none"; // no landmark
  for (const wide of document.querySelectorAll('.md-typeset__scrollwrap, p:has(> img[src$=".svg"])'))
    wide.tabIndex = 0; // it scrolls
}

new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
