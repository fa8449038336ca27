"""Functions of float64 that numerical code calls: sines, arcs, hyperbolic and error functions, powers, remainders.

Written as those of `doubles.py`, without branches, so that g++ makes vectors of them; without fused multiplications,
the library's are called. What no polynomial reaches is left to the library (`far.py`).
Of the time that the library's took, one element at a time: sine 0.13, erf 0.11, remainders 0.1 (Zen 4, AVX-512).
"""

from __future__ import annotations

from dcompile.codegen.emit.far import FAR

_BEGIN = r"""
#ifndef NO_DOUBLES
INLINE double copysign_(double x, double sign) { return __builtin_copysign(x, sign); }
#ifdef __FMA__
"""

_FUNCTIONS = r"""
/* what is left of x without quarter turns, d and `low`, and how many they were, plus 2046. The first step is exact */
INLINE u64 quarters_of(double x, double& d, double& low) {
  const double t = fma_(x, 0.6366197723675814, SHIFT_64), j = t - SHIFT_64;
  const double first = fma_(j, -1.5707963267948966, x), more = j * 6.123233995736766e-17;
  d = first - more;
  low = fma_(j, 1.4973849048591833e-33, ((first - d) - more) - fma_(j, 6.123233995736766e-17, -more));
  return bits(t);
}
/* sine and cosine of d + low, d within half a quarter, as sums of two numbers, of which the second is returned */
INLINE double sine_near(double d, double low, double& first) {
  const double s = d * d, v = s * d, v_low = fma_(fma_(d, d, -s), d, fma_(s, d, -v));
  double r = fma_(s, 1.58969099521155010221e-10, -2.50507602534068634195e-8);
  r = fma_(r, s, 2.75573137070700676789e-6);
  r = fma_(r, s, -1.98412698298579493134e-4);
  r = fma_(r, s, 8.33333333332248946124e-3);
  first = d;
  return fma_(v, -1.66666666666666324348e-1, fma_(v_low, -1.66666666666666324348e-1, low - s * fma_(-v, r, 0.5 * low)));
}
INLINE double cosine_near(double d, double low, double& first) {
  const double s = d * d, half = 0.5 * s;
  double r = fma_(s, -1.13596475577881948265e-11, 2.0875723212981748279e-9);
  r = fma_(r, s, -2.75573143513906633035e-7);
  r = fma_(r, s, 2.48015872894767294178e-5);
  r = fma_(r, s, -1.38888888888741095749e-3);
  r = fma_(r, s, 4.16666666666666019037e-2);
  first = 1. - half;
  return ((1. - first) - half) + fma_(s * s, r, -fma_(d, low, 0.5 * fma_(d, d, -s)));
}
/* sin(x + turns * pi / 2): which of the two it is, and its sign, the number of quarters says */
INLINE double turned_sine(double x, u64 turns) {
  double d, low, sine, cosine;
  const u64 quarters = quarters_of(x, d, low) + (turns - 2046u);
  const double more_sine = sine_near(d, low, sine), more_cosine = cosine_near(d, low, cosine);
  const double near = select_(quarters & 1, cosine + more_cosine, sine + more_sine);
  return unbits(bits(near) ^ (quarters << 62 & 0x8000000000000000ul));
}
INLINE double sin_(double x) { return far_sin(x, x, select_(x == 0., x, turned_sine(x, 0))); }
INLINE double cos_(double x) { return far_cos(x, x, turned_sine(x, 1)); }
INLINE double tan_(double x) {
  double d, low, sine, cosine;
  const bool odd = quarters_of(x, d, low) & 1;
  const double more_sine = sine_near(d, low, sine), more_cosine = cosine_near(d, low, cosine);
  const double s = sine + more_sine, s_low = more_sine - (s - sine), c = cosine + more_cosine;
  const double c_low = more_cosine - (c - cosine), above = select_(odd, -c, s), above_low = select_(odd, -c_low, s_low);
  const double below = select_(odd, s, c), below_low = select_(odd, s_low, c_low), part = 1. / below, q = above * part;
  const double near = fma_(fma_(-q, below, above) + fma_(-q, below_low, above_low), part, q);
  return far_tan(x, x, select_(x == 0., x, near));
}
/* asin(s) for s up to 1/2, whose square is z, without its first term */
INLINE double arc_of(double s, double z) {
  double r = fma_(z, 0.031794086872559156, -0.016038371169785626);
  r = fma_(r, z, 0.019399732123259558);
  r = fma_(r, z, 0.006579322969646034);
  r = fma_(r, z, 0.012156115981643744);
  r = fma_(r, z, 0.013887459008520548);
  r = fma_(r, z, 0.017359450518004606);
  r = fma_(r, z, 0.022371777405273442);
  r = fma_(r, z, 0.030381958190278956);
  r = fma_(r, z, 0.044642856856061966);
  r = fma_(r, z, 0.0750000000029457);
  r = fma_(r, z, 0.16666666666665653);
  return r * z * s;
}
/* beyond 1/2 by way of half the angle; s is a root, s_low what rounding took from it; quarter turns in two numbers */
INLINE double asin_(double a) {
  const double x = abs_(a), z = select_(x > 0.5, (1. - x) * 0.5, x * x), root = sqrt_(z), s = select_(x > 0.5, root, x);
  const double more = arc_of(s, z), s_low = fma_(-root, root, z) / select_(root == 0., 1., root), twice = s + s;
  const double first = 1.5707963267948966 - twice;
  const double rest = ((1.5707963267948966 - first) - twice) + (fma_(more, -2., 6.123233995736766e-17) - s_low);
  return copysign_(select_(x > 0.5, first + rest, s + more), a);
}
INLINE double acos_(double a) {
  const double x = abs_(a), z = select_(x > 0.5, (1. - x) * 0.5, x * x), root = sqrt_(z), s = select_(x > 0.5, root, a);
  const double s_low = fma_(-root, root, z) / select_(root == 0., 1., root), arc = arc_of(s, z);
  const double more = fma_(s_low, 0.5, arc), twice = s + s, first = 1.5707963267948966 - s;
  const double near = first + (((1.5707963267948966 - first) - s) - (arc - 6.123233995736766e-17));
  const double back = 3.141592653589793 - twice;
  const double behind = back + (((3.141592653589793 - back) - twice) - fma_(more, 2., -1.2246467991473532e-16));
  return select_(x > 0.5, select_(a < 0., behind, fma_(more, 2., twice)), near);
}
/* the smaller by the larger, which is at most 1, and then what is left of half a turn; all in two numbers */
INLINE double atan2_(double y, double x) {
  const double a = abs_(y), b = abs_(x);
  const bool steep = a > b;
  const double low = select_(steep, b, a), high = select_(steep, a, b);
  const double q = select_(a == b, select_(a == 0., a, 1.), low / high), s = q * q;
  const double left = select_(a == b, 0., select_(high == __builtin_inf(), 0., fma_(-q, high, low)));
  const double q_low = left / select_(high == 0., 1., high);
  double r = fma_(s, 1.3595320866547119e-05, -0.00015587591423398166);
  r = fma_(r, s, 0.0008485674248275187);
  r = fma_(r, s, -0.00293405567876386);
  r = fma_(r, s, 0.007292640284200241);
  r = fma_(r, s, -0.014037460504842362);
  r = fma_(r, s, 0.02213159561022782);
  r = fma_(r, s, -0.03002463600304051);
  r = fma_(r, s, 0.036719087969540105);
  r = fma_(r, s, -0.042230250496386144);
  r = fma_(r, s, 0.047238156371704844);
  r = fma_(r, s, -0.052539676686927564);
  r = fma_(r, s, 0.05880631230861412);
  r = fma_(r, s, -0.06666421970183234);
  r = fma_(r, s, 0.0769228211330113);
  r = fma_(r, s, -0.09090907206777549);
  r = fma_(r, s, 0.11111111019220604);
  r = fma_(r, s, -0.1428571428302172);
  r = fma_(r, s, 0.19999999999960055);
  const double cube = s * q, cube_low = fma_(fma_(q, q, -s), q, fma_(s, q, -cube));
  const double fifth = fma_(cube * s, r, fma_(cube_low, -0.3333333333333313, fma_(-0.5 * s, q_low, q_low)));
  const double rest = fma_(cube, -0.3333333333333313, fifth), first = 1.5707963267948966 - q;
  const double up = select_(steep, first, q);
  const double more = select_(steep, ((1.5707963267948966 - first) - q) - (rest - 6.123233995736766e-17), rest);
  const bool back = bits(x) >> 63;
  const double half = 3.141592653589793 - up;
  const double half_low = ((3.141592653589793 - half) - up) - (more - 1.2246467991473532e-16);
  return copysign_(select_(back, half, up) + select_(back, half_low, more), y);
}
/* e^(x + low) without its power of two, which is in t, as a sum of two numbers, of which the second is returned */
INLINE double exp_parts(double x, double low, double& t, double& first) {
  t = fma_(x, 1.4426950408889634, SHIFT_64);
  const double j = t - SHIFT_64, f = fma_(j, -0.6931471803691238, x), f_low = fma_(j, -1.9082149292705877e-10, low);
  const double g = f + f_low, r = fma_(g * g, exp_rest(1.6059043836821613e-10, g), f_low), one = 1. + f;
  const double rest = ((1. - one) + f) + r;
  first = one + rest;
  return rest - (first - one);
}
/* half of e^x, in two numbers: e^x itself may be too large where sinh and cosh are not */
INLINE double half_exp(double a, double& first) {
  const double x = a > 720. ? 720. : a;
  double t;
  const double rest = exp_parts(x, 0., t, first);
  first = scale_(first, t - 1., x);
  return scale_(rest, t - 1., x);
}
INLINE double sinh_(double a) {
  const double x = abs_(a), z = x * x;
  double half;
  const double low = half_exp(x, half), near = half - (0.25 / half - low);
  double r = fma_(z, 7.759221657611437e-13, 1.605724365550403e-10);
  r = fma_(r, z, 2.505212335059556e-08);
  r = fma_(r, z, 2.7557319155683527e-06);
  r = fma_(r, z, 0.00019841269841436386);
  r = fma_(r, z, 0.00833333333333314);
  r = fma_(r, z, 0.16666666666666669);
  return copysign_(select_(x < 1., fma_(r * z, x, x), select_(half < __builtin_inf(), near, half)), a);
}
INLINE double cosh_(double a) {
  double half;
  const double low = half_exp(abs_(a), half), near = half + (0.25 / half + low);
  return select_(half == __builtin_inf(), half, near);
}
/* erf(u) / u - 1 for u up to 1, whose square is s */
INLINE double erf_rest(double s) {
  double q = fma_(s, 5.960685338520971e-11, -1.137495573607015e-09);
  q = fma_(q, s, 1.466032872274226e-08);
  q = fma_(q, s, -1.6350396222864617e-07);
  q = fma_(q, s, 1.64610084778027e-06);
  q = fma_(q, s, -1.4925595772180906e-05);
  q = fma_(q, s, 0.0001205533113295582);
  q = fma_(q, s, -0.0008548326981425542);
  q = fma_(q, s, 0.005223977624828431);
  q = fma_(q, s, -0.026866170645077875);
  q = fma_(q, s, 0.11283791670954885);
  q = fma_(q, s, -0.3761263890318375);
  return fma_(q, s, 0.1283791670955126);
}
/* where u is large, 1 - erf(u) = e^polynomial, up to where erf is 1. Odd powers apart: what waits is half as long, with
   AVX2 0.79 of the time */
INLINE double erf_(double a) {
  const double x = abs_(a), u = x > 6. ? 6. : x, s = u * u;
  double r = fma_(s, 2.0202085069086934e-10, 4.593073322135117e-08);
  double odd = fma_(s, -4.864742504739347e-12, -3.8897805298077685e-09);
  r = fma_(r, s, 2.11470188127795e-06);
  odd = fma_(odd, s, -3.6954722919866033e-07);
  r = fma_(r, s, 2.2531599602456287e-05);
  odd = fma_(odd, s, -8.578380622501582e-06);
  r = fma_(r, s, -0.00013656237055273518);
  odd = fma_(odd, s, -1.9519659087947285e-05);
  r = fma_(r, s, -0.0019189610690146927);
  odd = fma_(odd, s, 0.000773055780438025);
  r = fma_(r, s, 0.0189880316660273);
  odd = fma_(odd, s, 0.0004135511059813081);
  r = fma_(r, s, -0.6366440570475073);
  odd = fma_(odd, s, -0.10270228438601402);
  r = fma_(r, s, -5.132857965659138e-07);
  odd = fma_(odd, s, -1.1283739912794626);
  return copysign_(select_(u > 1., 1. - exp_(fma_(odd, u, r)), fma_(erf_rest(s), u, u)), a);
}
/* (1 + 2 x) e^(x^2) erfc(x) is close to a polynomial in (x - 4) / (x + 4); the square's last bits count in a power */
INLINE double erfc_(double a) {
  const double y = abs_(a), x = y > 28. ? 28. : y, s = x * x, s_low = fma_(x, x, -s), part = 1. / (x + 4.);
  const double first = (x - 4.) * part, q = fma_(part, fma_(-first, x, fma_(first + 1., -4., x)), first);
  double r = fma_(q, -1.7163156592813124e-09, -1.3399113425605488e-08);
  r = fma_(r, q, -7.817444481695925e-09);
  r = fma_(r, q, 1.1457601816502303e-07);
  r = fma_(r, q, 6.249219630434075e-08);
  r = fma_(r, q, -8.342234921963891e-07);
  r = fma_(r, q, 3.018338582251501e-07);
  r = fma_(r, q, 5.717252573108148e-06);
  r = fma_(r, q, -1.1225200643869366e-05);
  r = fma_(r, q, -2.440290658671856e-05);
  r = fma_(r, q, 0.0001506224373745032);
  r = fma_(r, q, -0.0001992555763895305);
  r = fma_(r, q, -0.0007577733958489102);
  r = fma_(r, q, 0.005031969767346863);
  r = fma_(r, q, -0.016197734049916587);
  r = fma_(r, q, 0.03716751556131304);
  r = fma_(r, q, -0.06633036581241683);
  r = fma_(r, q, 0.09373283499686466);
  r = fma_(r, q, -0.10103906603630879);
  r = fma_(r, q, 0.06809705425473522);
  r = fma_(r, q, 0.015379652102619924);
  r = fma_(r, q, -0.1396211168405629);
  r = fma_(r, q, 1.2329951186255526);
  const double scale = fma_(x, 2., 1.), over = 1. / scale, quotient = r * over;
  const double left = fma_(-quotient, scale, r) * over;
  double t, e;
  const double rest = exp_parts(-s, -s_low, t, e), product = fma_(e, quotient, fma_(rest, quotient, e * left));
  const double far = scale_(product, t, -1.);
  const double near = 1. - fma_(erf_rest(s), a, a);
  return select_(a != a, a, select_(x < 0.5, near, select_(a < 0., 2. - far, far)));
}
/* to another base: `base` and `base_low` are 1 / log(base), `two` and `two_low` the logarithm of 2, `two` so short that
   its multiples are exact */
INLINE double log_by(double a, double base, double base_low, double two, double two_low) {
  double i, f, half, rest;
  log_parts(a, i, f, half, rest);
  const double g = f - half, g_low = ((f - g) - half) + (rest - fma_(0.5 * f, f, -half)), p = g * base;
  const double p_low = fma_(g_low, base, fma_(g, base_low, fma_(g, base, -p))), n = i * two, h = n + p;
  return log_ends(a, h + fma_(i, two_low, (p - (h - n)) + p_low));
}
INLINE double log2_(double a) { return log_by(a, 1.4426950408889634, 2.0355273740931033e-17, 1., 0.); }
INLINE double log10_(double a) {
  return log_by(a, 0.4342944819032518, 1.098319650216765e-17, 0.3010299955494702, 1.1451100898021838e-10);
}
/* log(1 + t + low) */
INLINE double log_above_one(double t, double low) {
  const double u = 1. + t, lost = select_(t > 1., 1. - (u - t), t - (u - 1.));
  return log_(u) + (lost + low) / u;
}
INLINE double asinh_(double a) {
  const double x = abs_(a), s = x * x, more = s / (1. + sqrt_(1. + s)), t = x + more;
  const double near = log_above_one(t, more - (t - x)), far = log_(x) + 0.6931471805599453;
  return copysign_(select_(x > 1e9, far, near), a);
}
INLINE double acosh_(double a) {
  const double t = a - 1., more = t + 2., s = t * more, s_low = fma_(t, more, -s) + t * (t - (more - 2.));
  const double root = sqrt_(s), left = (fma_(-root, root, s) + s_low) * 0.5 / select_(root == 0., 1., root);
  const double sum = root + t, near = log_above_one(sum, (t - (sum - root)) + left), far = log_(a) + 0.6931471805599453;
  return select_(a < 1., __builtin_nan(""), select_(a > 1e9, far, near));
}
INLINE double atanh_(double a) {
  const double x = abs_(a), d = 1. - x, q = (x + x) / d, low = (fma_(-q, d, x + x) - q * ((1. - d) - x)) / d;
  return copysign_(select_(x == 1., __builtin_inf(), 0.5 * log_above_one(q, low)), a);
}
/* the larger is made a number from 1 to 4, and what rounding takes from squares and root is put back */
INLINE double hypot_(double x, double y) {
  const double a = abs_(x), b = abs_(y), high = select_(a > b, a, b), low = select_(a > b, b, a);
  const u64 given = bits(high) & 0x7ff0000000000000ul, least = 0x0010000000000000ul, most = 0x7fd0000000000000ul;
  const u64 size = given < least ? least : given > most ? most : given;
  const double scale = unbits(0x7fe0000000000000ul - size), p = high * scale, q = low * scale;
  const double p2 = p * p, q2 = q * q, s = p2 + q2, root = sqrt_(s);
  const double lost = fma_(p, p, -p2) + (fma_(q, q, -q2) + ((p2 - s) + q2)), left = fma_(-root, root, s) + lost;
  const double near = fma_(left, 0.5 / select_(root == 0., 1., root), root) * unbits(size);
  return select_(isinf_(a) | isinf_(b), __builtin_inf(), select_(a != a, a, select_(b != b, b, near)));
}
/* exact as the library's: a quotient is rounded to a whole number that is at most one too large */
INLINE double fmod_(double a, double b) {
  const double size = abs_(b), turn = copysign_(size, a), left = fma_(-trunc_(a / b), b, a);
  const double back = select_((left < 0.) != (a < 0.) & (left != 0.), left + turn, left);
  return far_fmod(a, b, copysign_(back, a));
}
/* a^b = e^(b log(a)), the logarithm and its product with b in two numbers each. q = m / (m + 2), and
   log(1 + m) = 2 atanh(q) */
INLINE double pow_(double a, double b) {
  const double x = abs_(a);
  const bool tiny = x < 0x1p-1022;
  const double given = select_(tiny, x * 0x1p54, x);
  const u64 moved = bits(given) + (0x3ff0000000000000ul - 0x3fe6a09e667f3bcdul);
  const double m = unbits((moved & 0xffffffffffffful) + 0x3fe6a09e667f3bcdul) - 1.;
  const double i = unbits(moved >> 52 | 0x4330000000000000ul) - (0x1p52 + 1023.) - select_(tiny, 54., 0.);
  const double part = 1. / (m + 2.), q = part * m, q_low = part * fma_(q, -m, fma_(q, -2., m)), s = q * q;
  double r = fma_(s, 0.05985190262435825, 0.058386399589892446);
  r = fma_(r, s, 0.06668091311535707);
  r = fma_(r, s, 0.07692280412122863);
  r = fma_(r, s, 0.09090909402064903);
  r = fma_(r, s, 0.11111111109083532);
  r = fma_(r, s, 0.14285714285720996);
  r = fma_(r, s, 0.19999999999999993);
  const double s_low = fma_(q, q_low + q_low, fma_(q, q, -s)), cube = s * q;
  const double cube_low = fma_(s, q_low, fma_(s_low, q, fma_(s, q, -cube)));
  const double third = cube * 0.3333333333333333, third_low = fma_(cube, 0.3333333333333333, -third);
  const double more = fma_(cube_low, 0.3333333333333333, q_low + third_low), main = q + third, twice = main + main;
  const double rest = ((q - main) + third) + fma_(fma_(r, s, 1.850371707708594e-17), cube, more);
  const double whole = i * 0.6931471803691238, sum = whole + twice;
  const double sum_low = ((whole - sum) + twice) + fma_(i, 1.9082149292705877e-10, rest + rest), near = sum + sum_low;
  const double log = select_(x < __builtin_inf(), select_(x == 0., -__builtin_inf(), near), x);
  const double by = between(b, -1e308, 1e308), p = log * by;
  const double p_low = select_(abs_(p) < 1000., fma_((sum - near) + sum_low, by, fma_(near, by, -p)), 0.);
  const double y = between(p, -746., 710.);
  double t, e;
  exp_parts(y, p_low, t, e);
  const double power = scale_(e, t, y);
  /* what a negative number's power is: b may be odd, even (also beyond 2^53), or no whole number */
  const double half = b * 0.5;
  const bool is_whole = trunc_(b) == b, odd = is_whole & (trunc_(half) != half);
  const double turned = unbits(bits(power) ^ (odd ? bits(a) & 0x8000000000000000ul : 0ul));
  const double defined = select_(a < 0. & !is_whole & (x < __builtin_inf()), __builtin_nan(""), turned);
  return select_((b == 0.) | (a == 1.), 1., defined);
}
/* of floats, in doubles, that nothing is lost near its zeros: Stirling's series from 8 on, below by recurrence, below 0
   by reflection; quotients of gammas and sines have one logarithm */
INLINE float lgamma_(float a) {
  const double x = a, y = select_(x < 0., 1. - x, abs_(x)), part = x - round_(x);
  const double product = ((y * (y + 1.)) * ((y + 2.) * (y + 3.))) * (((y + 4.) * (y + 5.)) * ((y + 6.) * (y + 7.)));
  const double z = select_(y < 8., y + 8., y), by = select_(y < 8., product, 1.), over = 1. / z, s = over * over;
  double r = fma_(s, 6.410256410256410e-3, -1.917526917526918e-3);
  r = fma_(r, s, 8.417508417508417e-4);
  r = fma_(r, s, -5.952380952380953e-4);
  r = fma_(r, s, 7.936507936507937e-4);
  r = fma_(r, s, -2.777777777777778e-3);
  r = fma_(r, s, 8.333333333333333e-2);
  const double series = fma_(z - 0.5, log_(z), fma_(r, over, 0.9189385332046728 - z));
  const double sine = abs_(turned_sine(part * 3.141592653589793, 0));
  const double more = log_(select_(x < 0., by * 3.141592653589793, 1.) / select_(x < 0., sine, by));
  return float(select_(isinf_(x), __builtin_inf(), more + select_(x < 0., -series, series)));
}
#else
LIBM1(lgamma, lgamma)
LIBM(sin, sin) LIBM(cos, cos) LIBM(tan, tan) LIBM(asin, asin) LIBM(acos, acos) LIBM(sinh, sinh) LIBM(cosh, cosh)
LIBM(erf, erf) LIBM(erfc, erfc) LIBM(log2, log2) LIBM(log10, log10) LIBM(asinh, asinh) LIBM(acosh, acosh)
LIBM(atanh, atanh)
INLINE double atan2_(double a, double b) { return __builtin_atan2(a, b); }
INLINE double hypot_(double a, double b) { return __builtin_hypot(a, b); }
INLINE double fmod_(double a, double b) { return __builtin_fmod(a, b); }
INLINE double pow_(double a, double b) { return __builtin_pow(a, b); }
#endif
INLINE double one_plus_erf_(double a) { return 1. + erf_(a); }
#endif
"""

DOUBLE_ARCS = _BEGIN + FAR + _FUNCTIONS
