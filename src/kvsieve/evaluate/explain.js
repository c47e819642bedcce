"use strict";
const D=JSON.parse(document.getElementById("data").textContent);
const bytes=Uint8Array.from(atob(D.cells),c=>c.charCodeAt(0));
const L=D.layers.length,H=D.heads,T=D.steps,S=D.pages,N=T*S;
const level=i=>{const q=bytes[i]>>1;return q?Math.pow(10,q/127*D.decades-D.decades):0};
const $=id=>document.getElementById(id);
let mass=new Float64Array(N),kept=new Float64Array(N),at=null;
function gather(){
 const layer=$("layer").value,head=$("head").value;
 const ls=layer==="all"?[...Array(L).keys()]:[+layer],hs=head==="all"?[...Array(H).keys()]:[+head];
 mass.fill(0);kept.fill(0);
 for(const l of ls)for(const h of hs){const base=(l*H+h)*N;
  for(let i=0;i<N;i++){mass[i]+=level(base+i);kept[i]+=bytes[base+i]&1}}
 const n=ls.length*hs.length;for(let i=0;i<N;i++){mass[i]/=n;kept[i]/=n}
}
function colour(name){const c=document.createElement("canvas").getContext("2d");
 c.fillStyle=getComputedStyle(document.documentElement).getPropertyValue(name).trim();c.fillRect(0,0,1,1);
 return c.getImageData(0,0,1,1).data}
function draw(){
 gather();
 const paper=colour("--panel"),blue=colour("--heat"),orange=colour("--lost"),ink=colour("--ink");
 const w=Math.max(2,Math.ceil(700/S)),h=Math.max(4,Math.min(14,Math.ceil(360/T)));
 for(const id of ["keptMap","massMap"]){
  const cv=$(id);cv.width=S*w;cv.height=T*h;const c=cv.getContext("2d"),im=c.createImageData(cv.width,cv.height);
  for(let t=0;t<T;t++)for(let p=0;p<S;p++){const i=t*S+p;
   let a,r,g,b;
   if(id==="keptMap"){a=kept[i];[r,g,b]=blue}
   else{a=mass[i]>0?Math.max(0,1+Math.log10(mass[i])/D.decades):0;const k=kept[i];
    r=blue[0]*k+orange[0]*(1-k);g=blue[1]*k+orange[1]*(1-k);b=blue[2]*k+orange[2]*(1-k)}
   if(p*D.page>=D.prompt+t+1)a=0;
   for(let y=0;y<h;y++)for(let x=0;x<w;x++){const o=((t*h+y)*cv.width+p*w+x)*4;
    const e=a*(x===w-1&&w>3||y===h-1&&h>4?.75:1);
    im.data[o]=r*e+paper[0]*(1-e);im.data[o+1]=g*e+paper[1]*(1-e);im.data[o+2]=b*e+paper[2]*(1-e);im.data[o+3]=255}}
  c.putImageData(im,0,0);
  if(at){c.strokeStyle=`rgb(${ink[0]},${ink[1]},${ink[2]})`;c.lineWidth=2;c.strokeRect(at[1]*w+.5,at[0]*h+.5,w-1,h-1)}
 }
}
function show(t,p){
 at=[t,p];draw();
 const i=t*S+p,first=p*D.page,last=Math.min(first+D.page,D.prompt+t+1),say=$("say");
 if(last<=first){say.textContent="This page does not exist yet at this step.";return}
 const text=D.pieces.slice(first,last).join("").replaceAll("\n","\u21b5");
 const head=document.createElement("b");
 head.textContent=`Step ${t}, reading ${JSON.stringify(D.pieces[D.prompt+t])}: page ${p}, tokens ${first}-${last-1}`;
 const many=$("layer").value==="all"||$("head").value==="all";
 const share=many?`kept by ${(100*kept[i]).toFixed(0)}%`:kept[i]?"kept":"not kept";
 const m=document.createElement("div");m.textContent=`${share}; exact attention about ${(100*mass[i]).toPrecision(2)}%`;
 const q=document.createElement("div");q.className="soft";q.textContent=text;
 say.replaceChildren(head,m,q);
}
for(const id of ["keptMap","massMap"])for(const kind of ["pointermove","pointerdown"])
 $(id).addEventListener(kind,e=>{const r=e.currentTarget.getBoundingClientRect();
  show(Math.min(T-1,Math.max(0,Math.floor((e.clientY-r.top)/r.height*T))),
       Math.min(S-1,Math.max(0,Math.floor((e.clientX-r.left)/r.width*S))))});
for(const id of ["layer","head"])$(id).addEventListener("change",()=>{at?show(at[0],at[1]):draw()});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change",draw);
if(D.worst){$("layer").value=D.worst[0];$("head").value=D.worst[1];show(D.worst[2],D.worst[3])}else draw();
