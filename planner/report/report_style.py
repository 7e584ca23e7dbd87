"""The style sheet of the planner's HTML report."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#667078;--line:#e3e5e8;--grid:#eceef0;
--good:#0f7b57;--warm:#9a5b00;--c0:#2f62d9;--c1:#d9730d;--c2:#0e9384;--c3:#8a4fd0}
@media(prefers-color-scheme:dark){:root{--bg:#121417;--card:#1a1d21;--ink:#e7e9ec;--soft:#98a2ab;--line:#2b3036;
--grid:#262a30;--good:#4cc79b;--warm:#e5a847;--c0:#7ea6ff;--c1:#f5a04a;--c2:#45cdbb;--c3:#c09bff}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1280px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:26px;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:18px;margin:44px 0 12px}
h3{font-size:14px;margin:0 0 2px;font-weight:600}
p{margin:0 0 8px}
.soft{color:var(--soft)}
.verdict{margin:24px 0;padding:16px 20px;border-left:4px solid var(--good);background:var(--card);
border-radius:0 8px 8px 0;font-size:17px}
.verdict.unclear{border-color:var(--warm)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}
.tile b{display:block;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:8px 12px;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500;font-size:13px}
tr:last-child td{border-bottom:0}
tr.first td{font-weight:600}
.n{text-align:right;font-variant-numeric:tabular-nums}
li{margin:4px 0}
ul{padding-left:20px;margin:0}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px;margin:0 0 8px}
summary{cursor:pointer}
dt{margin-top:12px}
dd{margin:0;color:var(--soft);font-size:14px;overflow-wrap:anywhere}
figure{margin:8px 0 0}
svg{display:block;width:100%;height:auto;font-family:inherit}
"""
"""Colours are variables, so that one sheet serves light and dark."""
