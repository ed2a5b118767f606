"""A heat map as one HTML file: no script, style or font from elsewhere, readable with the keyboard and on a phone."""

import html
import itertools
import json
import math

from ...text import CONTINUED, shorten, visible_text, visible_token
from .data import ResponseHeatmap, explanation, meaning_of, number, short_name, write_atomically

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1a1a1a;--quiet:#595959;--line:#c4c4c4;--panel:#f3f3f3;
--blue:10 78 150;--orange:190 80 0;--none:#d9d9d9;--focus:#a100a1}
@media(prefers-color-scheme:dark){:root{--bg:#16181c;--ink:#f0f0f0;--quiet:#adadad;--line:#4a4d54;--panel:#24272d;
--blue:95 175 255;--orange:255 150 50;--none:#5a5a5a;--focus:#ff8cff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem 1rem 6rem;max-width:76rem;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;line-height:1.25;margin:.2rem 0 .5rem}
h2{font-size:1rem;margin:.8rem 0 .1rem}
p{margin:.3rem 0;max-width:65rem}
.quiet{color:var(--quiet)}
.prompt{white-space:pre-wrap;margin:0}
details{margin:.2rem 0}
mark{color:inherit;border-radius:2px;padding:0 1px}
mark.b{background:rgb(var(--blue)/.25)}
mark.o{background:rgb(var(--orange)/.25)}
.legend{display:flex;flex-wrap:wrap;gap:.6rem 1.6rem;padding:.6rem 0;margin:.8rem 0;
border:solid var(--line);border-width:1px 0}
.legend>div{flex:1 1 15rem;font-size:.85rem;line-height:1.35}
.legend>div:last-child{flex:0 1 11rem}
.bar{height:.9rem;border:1px solid var(--line);margin:.2rem 0}
.bar.b{background:linear-gradient(90deg,rgb(var(--blue)/0),rgb(var(--blue)))}
.bar.o{background:linear-gradient(90deg,rgb(var(--orange)/0),rgb(var(--orange)))}
.bar.s{background:linear-gradient(90deg,rgb(var(--orange)),rgb(var(--orange)/0) 50%,rgb(var(--blue)/0) 50%,
rgb(var(--blue)))}
.ends{display:flex;flex-wrap:wrap;justify-content:space-between;gap:.5rem}
.ends :last-child{text-align:right}
.sample{display:inline-block;outline:2.5px solid var(--ink);font-weight:700;padding:.3rem .5rem;margin:.2rem 0 .3rem}
.view>input{position:absolute;opacity:0}
.view>label{display:inline-block;padding:.45rem .8rem;margin:0 .3rem .4rem 0;border:1px solid var(--line);
border-radius:.4rem;cursor:pointer}
.view>input:checked+label{background:var(--ink);color:var(--bg)}
.view>input:focus-visible+label{outline:3px solid var(--focus);outline-offset:2px}
#overview{width:100%;display:block;cursor:pointer;margin:.2rem 0 .8rem}
.flow{position:relative;padding-left:7.2rem;margin-top:.4rem}
.t{display:inline-block;vertical-align:top;min-width:1.7em;max-width:100%;margin:0 1px .9rem;text-align:center;
white-space:pre-wrap;cursor:default;border:1px solid transparent;
scroll-margin:1rem 0 5rem}
.t b{display:block;font-weight:400;line-height:1.7;padding:0 .2em}
.t u{text-decoration:none;color:var(--quiet);opacity:.75}
.t i,.g i{display:block;height:1.05rem;border:solid var(--line);border-width:0 1px 1px}
.t b+i{border-top-width:1px}
.t .b{background:rgb(var(--blue)/var(--a))}
.t .o{background:rgb(var(--orange)/var(--a))}
.t .x{background:repeating-linear-gradient(45deg,var(--none) 0 3px,transparent 3px 6px)}
.k{outline:2.5px solid var(--ink);outline-offset:-1px}
.k b{font-weight:700}
.t:hover{box-shadow:0 0 0 2px var(--focus)}
.t:focus{box-shadow:0 0 0 4px var(--focus);outline-color:var(--focus)}
.g{position:absolute;left:0;width:6.8rem;text-align:right;font-size:.8rem;line-height:1.05rem;white-space:nowrap}
.g i{border-color:transparent;font-style:normal;overflow:hidden}
.g b{display:block;font-weight:400;height:1.75rem;line-height:1.75rem;color:var(--quiet)}
#details{position:fixed;left:0;right:0;bottom:0;padding:.6rem 1rem;background:var(--panel);
border-top:1px solid var(--line);min-height:3.2rem;text-align:center;z-index:2}
@media(max-width:40rem){.flow{padding-left:0}.g{display:none}}
@media print{#details{display:none}.t i,.bar{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

# Everything that the script knows, it reads from the page: no text of a model ever becomes code.
SCRIPT = """
(()=>{
const flow=document.querySelector('.flow'),panel=document.getElementById('details');
const tokens=[...flow.querySelectorAll('.t')];
let at=0;
tokens.forEach((t,i)=>{t.dataset.d=t.title;t.setAttribute('aria-label',t.title);t.removeAttribute('title');t.tabIndex=-1});
tokens[0].tabIndex=0;
const show=i=>{panel.textContent=tokens[i].dataset.d};
const go=i=>{
  i=Math.max(0,Math.min(tokens.length-1,i));
  tokens[at].tabIndex=-1;at=i;tokens[i].tabIndex=0;tokens[i].focus();
};
const jump=i=>{go(i);tokens[i].scrollIntoView({block:'center'})};
const indexOf=e=>{const t=e.target.closest('.t');return t?tokens.indexOf(t):-1};
flow.addEventListener('mouseover',e=>{const i=indexOf(e);if(i>=0)show(i)});
flow.addEventListener('focusin',e=>{const i=indexOf(e);if(i>=0)show(i)});
flow.addEventListener('click',e=>{const i=indexOf(e);if(i>=0)go(i)});
const vertical=(i,down)=>{
  const r=tokens[i].getBoundingClientRect(),x=r.left+r.width/2,step=down?1:-1;
  let best=i,distance=1e9,line=null;
  for(let j=i+step;j>=0&&j<tokens.length;j+=step){
    const q=tokens[j].getBoundingClientRect();
    if(Math.abs(q.top-r.top)<4)continue;
    if(line===null)line=q.top;
    if(Math.abs(q.top-line)>4)break;
    const d=Math.abs(q.left+q.width/2-x);
    if(d<distance){distance=d;best=j}
  }
  return best;
};
flow.addEventListener('keydown',e=>{
  if(e.ctrlKey||e.metaKey||e.altKey)return;
  let to=null;
  if(e.key==='ArrowRight')to=at+1;
  else if(e.key==='ArrowLeft')to=at-1;
  else if(e.key==='ArrowDown'||e.key==='ArrowUp')to=vertical(at,e.key==='ArrowDown');
  else if(e.key==='Home')to=0;
  else if(e.key==='End')to=tokens.length-1;
  else if(e.key==='n'){to=tokens.findIndex((t,i)=>i>at&&t.classList.contains('k'));if(to<0)to=at}
  else if(e.key==='p'){to=at;for(let j=at-1;j>=0;j--)if(tokens[j].classList.contains('k')){to=j;break}}
  if(to!==null){e.preventDefault();go(to)}
});
const names=flow.dataset.names?JSON.parse(flow.dataset.names):[];
const gutter=()=>{
  flow.querySelectorAll('.g').forEach(g=>g.remove());
  let top=-1e9;
  const labels=document.createDocumentFragment();
  tokens.forEach((t,i)=>{
    if(Math.abs(t.offsetTop-top)<4)return;
    top=t.offsetTop;
    const g=document.createElement('div');g.className='g';g.setAttribute('aria-hidden','true');g.style.top=top+'px';
    const b=document.createElement('b');b.textContent=i+1;g.append(b);
    names.forEach(n=>{const e=document.createElement('i');e.textContent=n;g.append(e)});
    labels.append(g);
  });
  flow.append(labels);
};
const overview=()=>{
  const c=document.getElementById('overview');
  if(!c)return;
  const n=tokens.length,rows=names.length,w=c.clientWidth,h=18,left=90,scale=window.devicePixelRatio||1;
  const height=(rows+1)*(h+4)+18;
  c.style.height=height+'px';c.width=w*scale;c.height=height*scale;
  const g=c.getContext('2d'),css=getComputedStyle(document.documentElement);
  const colour=v=>css.getPropertyValue(v).trim();
  g.scale(scale,scale);g.font='12px system-ui,sans-serif';
  const wide=w-left-4,bins=Math.min(n,Math.floor(wide));
  for(let r=0;r<=rows;r++){
    const y=r*(h+4);
    g.fillStyle=colour('--ink');g.textAlign='right';g.fillText(r<rows?names[r]:'kept',left-8,y+13,left-10);
    for(let b=0;b<bins;b++){
      let a=0,kind='b',kept=0,m=0;
      for(let i=Math.floor(b*n/bins);i<Math.floor((b+1)*n/bins);i++){
        m++;
        if(r===rows){kept+=tokens[i].classList.contains('k');continue}
        const cell=tokens[i].querySelectorAll('i')[r],v=parseFloat(cell.style.getPropertyValue('--a'))||0;
        if(v>a){a=v;kind=cell.className}
      }
      if(r===rows)a=kept/m;
      g.fillStyle=r===rows?colour('--ink'):'rgb('+colour(kind==='o'?'--orange':'--blue')+' / '+a+')';
      g.globalAlpha=r===rows?a:1;
      g.fillRect(left+b*wide/bins,y,Math.max(wide/bins,.6),h);
      g.globalAlpha=1;
    }
    g.strokeStyle=colour('--line');g.strokeRect(left,y+.5,wide,h);
  }
  g.fillStyle=colour('--quiet');g.textAlign='center';
  for(let k=0;k<=4;k++)g.fillText(k?Math.round(k*n/4).toLocaleString('en'):1,Math.min(left+k*wide/4,w-20),height-4);
  c.onclick=e=>{const i=Math.floor((e.offsetX-left)/wide*n);if(i>=0&&i<n)jump(i)};
};
const peak=document.getElementById('peak');
if(peak){peak.hidden=false;peak.onclick=()=>jump(+peak.dataset.at)}
const draw=()=>{gutter();overview()};
draw();
let wait;
addEventListener('resize',()=>{clearTimeout(wait);wait=setTimeout(draw,150)});
document.querySelectorAll('.view>input').forEach(e=>e.addEventListener('change',gutter));
matchMedia('(prefers-color-scheme:dark)').addEventListener('change',draw);
panel.textContent='Point at a token, tap it, or use the arrow keys (n and p: next and previous kept token).';
})();
"""


def save_html(heatmap: ResponseHeatmap, path) -> None:
    """
    Write a heat map as one HTML file that opens anywhere, without a network.

    Pointing at a token, tapping it or reaching it with the arrow keys shows its position, text and values. A switch
    shows all rows or one. The whole response is there, with an overview to jump from when it is long.

    Args:
        heatmap ([`ResponseHeatmap`]): What to show.
        path (`str` or `os.PathLike`): File to write, whole or not at all.
    """
    write_atomically(path, page(heatmap).encode("utf-8"))


def page(heatmap: ResponseHeatmap) -> str:
    """The text of the file that [`save_html`] writes; also what a logger can take as it is."""
    title = html.escape(visible_text(heatmap.title))
    body = [
        f"<h1>{title}</h1>",
        f'<p class="quiet">{html.escape(explanation(heatmap))}</p>',
        *_prompts(heatmap),
        _legend(heatmap),
        '<div class="view">',
        *_switch(heatmap),
    ]
    if heatmap.is_long:
        name = html.escape(short_name(list(heatmap.rows)[-1]))
        body += [
            f'<h2>Overview: the whole answer, {len(heatmap):,} tokens <button id="peak" type="button" hidden '
            f'data-at="{heatmap.peak()}">Go to the highest {name}</button></h2>',
            '<p class="quiet">A column of the overview shows the value furthest from zero among its tokens, its lowest '
            "strip the share that is kept; click it to go there.</p>",
            '<canvas id="overview" role="img" aria-label="Overview of all tokens"></canvas>',
        ]
    names = html.escape(_json_names(heatmap))
    body += [f'<div class="flow" data-names="{names}">', *_tokens(heatmap), "</div></div>"]
    body += [f'<p class="quiet">{html.escape(line)}</p>' for line in _footer(heatmap)]
    body.append('<div id="details" role="status">Point at a token to see its values.</div>')
    switch = "".join(
        f"#r{r}:checked~.flow i:not(:nth-of-type({r + 1})){{display:none}}"
        f"#r{r}:checked~.flow i{{height:1.9rem;line-height:1.9rem;border-top-width:1px}}"
        for r in range(len(heatmap.rows))
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}{switch}</style></head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def _json_names(heatmap: ResponseHeatmap) -> str:
    return json.dumps([visible_text(short_name(label)) for label in heatmap.rows])


def _prompts(heatmap: ResponseHeatmap):
    for heading, pieces in heatmap.prompts():
        kind = "o" if heading.startswith("Paraphrase") else "b"
        short = shorten(pieces)
        yield f'<h2>{html.escape(heading)}</h2><div class="prompt">{_marked(short, kind)}</div>'
        if short is not pieces:
            yield f'<details><summary>Full text</summary><div class="prompt">{_marked(pieces, kind)}</div></details>'


def _marked(pieces, kind: str) -> str:
    parts = []
    for changed, group in itertools.groupby(pieces, key=lambda piece: piece[1]):
        text = html.escape(visible_text("".join(text for text, _ in group)))
        parts.append(f'<mark class="{kind}">{text}</mark>' if changed else text)
    return "".join(parts)


def _legend(heatmap: ResponseHeatmap) -> str:
    places = ("top", "middle", "bottom") if len(heatmap.rows) == 3 else ()
    items = []
    for r, label in enumerate(heatmap.rows):
        style, limit = heatmap.styles[label], heatmap.limit(label)
        kind = {"blue": "b", "orange": "o", "signed": "s"}[style.colour]
        low = number(-limit) if style.colour == "signed" else "0"
        zero = "<span>0</span>" if style.colour == "signed" else ""
        place = f" <span class=quiet>({places[r]} bar)</span>" if places else ""
        meaning = html.escape(meaning_of(heatmap, label))
        items.append(
            f"<div><strong>{html.escape(visible_text(short_name(label)))}</strong>{place}<br>{meaning}"
            f'<div class="bar {kind}"></div>'
            f'<div class="ends"><span>{low}</span>{zero}<span>{number(limit)} {html.escape(style.unit)}</span></div>'
            f'<div class="ends quiet"><span>{html.escape(style.low)}</span><span>{html.escape(style.high)}</span></div>'
            "</div>"
        )
    items.append('<div><span class="sample">framed</span><br>kept for training; all other tokens are not trained</div>')
    return f'<div class="legend">{"".join(items)}</div>'


def _switch(heatmap: ResponseHeatmap):
    choices = [("all", "All rows")]
    choices += [(str(r), visible_text(short_name(label))) for r, label in enumerate(heatmap.rows)]
    for key, text in choices:
        checked = " checked" if key == "all" else ""
        yield (
            f'<input type="radio" name="rows" id="r{key}" autocomplete="off"{checked}>'
            f'<label for="r{key}">{html.escape(text)}</label>'
        )


def _tokens(heatmap: ResponseHeatmap):
    n = len(heatmap)
    rows = [
        (visible_text(short_name(label)), values, heatmap.limit(label), heatmap.styles[label])
        for label, values in heatmap.rows.items()
    ]
    for i, token in enumerate(heatmap.tokens):
        text = visible_token(token)
        cells, details = [], [f"Token {i + 1:,} of {n:,}: “{text}”"]
        for name, values, limit, style in rows:
            value = values[i]
            if not math.isfinite(value):
                cells.append('<i class="x"></i>')
                details.append(f"{name}: no value")
                continue
            kind = "o" if style.colour == "orange" or (style.colour == "signed" and value < 0) else "b"
            share = 0.0 if style.colour != "signed" and value < 0 else abs(value) / limit
            cells.append(f'<i class="{kind}" style="--a:{share:.3g}"></i>')
            exact = f"{value:.4f}".replace("-", "\u2212")
            details.append(f"{name} {exact} {style.unit}".rstrip())
        kept = heatmap.kept[i]
        details.append("kept for training" if kept else "not trained")
        shown = html.escape(text)
        if text.startswith("␣") and len(text) > 1:
            shown = f"<u>␣</u>{shown[1:]}"
        # The response breaks its lines where it did when it was written.
        end = "<br>" if "\n" in token else ""
        yield (
            f'<span class="t{" k" if kept else ""}" title="{html.escape(" · ".join(details))}"><b>{shown}</b>'
            f"{''.join(cells)}</span>{end}"
        )


def _footer(heatmap: ResponseHeatmap) -> list[str]:
    lines = [heatmap.summary()]
    if heatmap.note:
        lines.append(visible_text(heatmap.note))
    if heatmap.has_missing():
        lines.append("Hatched: no value.")
    return [*lines, f"Marks: ␣ a space, ⏎ a line break, {CONTINUED} the rest of a character that takes several tokens."]
