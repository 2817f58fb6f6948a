"""The look of the HTML reports, as one style sheet.

Colours of series are Okabe and Ito's (https://jfly.uni-koeln.de/color/), darkened on light and lightened on dark
ground to a contrast of at least 3:1; text has at least 4.5:1. Nothing is said by colour alone.
"""

STYLE = """
:root{color-scheme:light dark;
--paper:#fbfaf7;--card:#fff;--ink:#1b1f23;--soft:#59626d;--line:#e3dfd6;--grid:#ece9e2;--accent:#0a5f9e;--wash:#e4eef7;
--bar:#9cc3e2;--good:#00694a;--bad:#a83c00;--s0:#0072b2;--s1:#d55e00;--s2:#00875f;--s3:#b4558a;--s4:#a87400;--s5:#2b8fc9;
--s6:#4a4f57;--shade:#1b1f2340}
@media (prefers-color-scheme:dark){:root{
--paper:#101318;--card:#171b22;--ink:#e8e6e1;--soft:#a2abb6;--line:#2b313b;--grid:#232932;--accent:#74bdf2;--wash:#1d2a38;
--bar:#2f618a;--good:#4fd1a5;--bad:#ff9a62;--s0:#58b4ee;--s1:#ff8b45;--s2:#33c796;--s3:#e69ac6;--s4:#e6a91f;--s5:#a5d8f8;
--s6:#c9ced6;--shade:#e8e6e138}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
header,main,footer{max-width:74rem;margin:0 auto;padding:0 clamp(1rem,4vw,2.5rem)}
main:focus{outline:none}
header{padding-top:clamp(1.75rem,5vw,3.5rem)}
h1,h2,h3{line-height:1.2;overflow-wrap:anywhere;text-wrap:balance}
h1{font-size:clamp(1.7rem,1.2rem + 2.4vw,2.75rem);font-weight:700;letter-spacing:-.02em;margin:.1em 0 .35em}
h2{font-size:1.5rem;letter-spacing:-.01em;margin:0 0 .75rem;padding-top:1.5rem;border-top:2px solid var(--ink)}
h3{font-size:1.06rem;margin:2.1rem 0 .65rem}
section{margin:3rem 0}
p{margin:.4rem 0;max-width:46rem}
a{color:var(--accent);text-underline-offset:.2em}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px;border-radius:4px}
code,pre,.key{font-family:ui-monospace,"SF Mono",SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.875em;overflow-wrap:anywhere}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.75rem 1rem;overflow-x:auto;
font-size:.85rem;line-height:1.5;margin:.6rem 0}
.eyebrow{margin:0;color:var(--accent);font-size:.8rem;font-weight:650;letter-spacing:.1em;text-transform:uppercase}
.lead{font-size:1.1rem;color:var(--soft);max-width:52rem;margin:0 0 1.1rem}
.note{color:var(--soft);font-size:.875rem}
.skip{position:absolute;left:-100vw;top:.5rem;background:var(--card);padding:.5rem 1rem;z-index:1}
.skip:focus{left:.5rem}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
nav ul{display:flex;flex-wrap:wrap;gap:.45rem;list-style:none;margin:0 0 1.75rem;padding:0}
nav a{display:block;padding:.3rem .8rem;border:1px solid var(--line);border-radius:99px;background:var(--card);
color:var(--ink);text-decoration:none;font-size:.9rem}
nav a:hover{border-color:var(--accent);color:var(--accent)}
.tiles{display:flex;flex-wrap:wrap;gap:1px;margin:0;background:var(--line);
border:1px solid var(--line);border-radius:12px;overflow:hidden}
.tiles>div{flex:1 1 9.5rem;background:var(--card);padding:.95rem 1.1rem 1rem}
.tiles dt{color:var(--soft);font-size:.8rem}
.tiles dd{margin:0}
.tiles strong{display:block;font-size:1.55rem;line-height:1.25;font-weight:650;letter-spacing:-.015em;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tiles dd span{color:var(--soft);font-size:.8rem;line-height:1.35;display:block}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,17rem),1fr));gap:0 2rem;margin:.75rem 0}
.facts>div{display:flex;gap:.75rem;justify-content:space-between;border-bottom:1px solid var(--line);padding:.4rem 0;
font-size:.92rem}
.facts dt{color:var(--soft);flex:none}
.facts dd{margin:0;text-align:right;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;margin:.75rem 0;background: /* shadows where more is hidden */
linear-gradient(90deg,var(--paper) 45%,transparent) 0 0/3rem 100% no-repeat local,
linear-gradient(270deg,var(--paper) 45%,transparent) 100% 0/3rem 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/1rem 100% no-repeat scroll,
linear-gradient(270deg,var(--shade),transparent) 100% 0/1rem 100% no-repeat scroll}
.tall{max-height:32rem;overflow-y:auto;border:1px solid var(--line);border-radius:8px}
.tall thead th{position:sticky;top:0;background:var(--card)}
.tall th:first-child,.tall td:first-child{padding-left:.75rem}
.tall th:last-child,.tall td:last-child{padding-right:.75rem}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:0 0 .4rem}
th,td{text-align:left;padding:.38rem .9rem .38rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th:last-child,td:last-child{padding-right:.25rem}
thead th{color:var(--soft);font-weight:500;font-size:.82rem;white-space:nowrap;border-bottom-color:var(--soft)}
tbody th{font-weight:500;overflow-wrap:break-word}
td bdi,th bdi{display:inline-block;max-width:26rem;min-width:6rem;overflow-wrap:anywhere}
.word,th code{white-space:nowrap}
tbody tr:hover{background:var(--wash)}
.num{text-align:right;white-space:nowrap}
.bars{width:50%;white-space:nowrap;vertical-align:middle}
.track{display:inline-block;width:calc(100% - 5.5rem);height:.8rem;vertical-align:-.08rem}
.bar{display:block;height:100%;min-width:1px;background:var(--s0);border-radius:0 3px 3px 0}
.value{display:inline-block;width:5.5rem;text-align:right}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:1.1rem 1.5rem;
align-items:start}
.columns>*{min-width:0;margin-top:0}
.wide{grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr))}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,12rem),1fr));gap:0 1.5rem}
.chart{margin:0;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:.95rem 1rem .75rem}
.chart figcaption{font-weight:600;font-size:.95rem;margin-bottom:.4rem}
.chart svg{display:block;width:100%;max-width:34rem;height:auto;margin:0 auto;overflow:visible}
.chart .note{font-size:.82rem;margin:.5rem 0 0}
svg text{fill:var(--soft);font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
svg .grid{stroke:var(--grid)}
svg .axis{stroke:var(--soft);stroke-width:1}
svg .area{fill:var(--bar);fill-opacity:.55}
svg .edge{fill:none;stroke:var(--s0);stroke-width:2;stroke-linejoin:round}
svg .fill{fill:var(--s0)}
svg .mark{stroke:var(--s1);stroke-width:1.5;stroke-dasharray:5 3;fill:none}
svg .mark-text{fill:var(--bad);font-weight:600}
svg .faint{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 4;fill:none}
svg .line{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}
.sheet{display:grid;grid-template-columns:repeat(auto-fill,minmax(7.25rem,1fr));gap:.9rem .7rem;list-style:none;
margin:.75rem 0;padding:0}
.sheet figure{margin:0}
.sheet img{display:block;width:100%;height:auto;aspect-ratio:1;border-radius:6px;background:var(--wash)}
.pixels img{image-rendering:pixelated}
.sheet figcaption{font-size:.78rem;line-height:1.3;margin-top:.35rem}
.sheet b{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden;font-weight:600;
overflow-wrap:anywhere}
.sheet .key{display:block;font-size:.66rem;color:var(--soft);overflow-wrap:anywhere}
details{border-bottom:1px solid var(--line);padding:.5rem 0}
summary{cursor:pointer;font-weight:550;padding:.15rem 0}
summary:hover{color:var(--accent)}
.checks{list-style:none;padding:0;margin:.75rem 0}
.checks li{display:flex;gap:.6rem;padding:.28rem 0}
.checks .mark{flex:none;width:1.35rem;height:1.35rem;margin-top:.1rem;border-radius:50%;display:grid;place-items:center;
font-size:.78rem;font-weight:700;color:var(--card);background:var(--good)}
.checks .bad{color:var(--bad);font-weight:600}
.checks .bad .mark{background:var(--bad)}
.legend{display:flex;flex-wrap:wrap;gap:.35rem 1.25rem;list-style:none;margin:.5rem 0 1rem;padding:0;font-size:.9rem}
.legend li{display:flex;gap:.5rem;align-items:center;overflow-wrap:anywhere}
.legend svg{flex:none;width:2.4rem;height:.8rem}
.best{font-weight:700}
.matrix td,.matrix thead th+th{padding-left:.6rem;min-width:9.5rem}
.differs{background:var(--wash);font-weight:600}
footer{color:var(--soft);font-size:.85rem;padding-top:1rem;padding-bottom:2.5rem}
@media (max-width:34rem){
.sheet{grid-template-columns:repeat(auto-fill,minmax(5.9rem,1fr))}.bars{width:46%}.value{width:4.3rem}
.track{width:calc(100% - 4.3rem)}svg text{font-size:13.5px}
.tiles>div{flex-basis:40%}.tiles strong{font-size:1.3rem}.facts dt{flex:0 1 auto}}
@media (prefers-reduced-motion:no-preference){html{scroll-behavior:smooth}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;--grid:#ddd;--accent:#0a5f9e;--wash:#eee;
--bar:#9cc3e2;--good:#00694a;--bad:#a83c00;--s0:#0072b2;--s1:#d55e00;--s2:#00875f;--s3:#b4558a;--s4:#a87400;--s5:#2b8fc9;
--s6:#4a4f57}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
body{font-size:10pt}nav,.skip{display:none}header,main,footer{max-width:none;padding:0}
.scroll,.tall{overflow:visible;max-height:none;background:none}
figure,tr,.sheet li,.tiles>div{break-inside:avoid}h2,h3,caption{break-after:avoid}}
"""
