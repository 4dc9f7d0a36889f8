// Before the first paint, so that the page does not flash in the other theme.
try {
  const theme = JSON.parse(localStorage.getItem("canvax.theme"));
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage is off: the system's theme */ }
