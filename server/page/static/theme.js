// Before anything is drawn: the theme that was chosen, if one was.
try {
  const theme = localStorage.getItem('piecework-theme');
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
} catch { /* a browser that keeps nothing has the system's theme */ }
