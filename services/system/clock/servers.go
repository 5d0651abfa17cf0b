package clock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/beevik/ntp"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/reason"
)

const (
	// queryTimeout: a later answer is useless, because its error is up to half of
	// that.
	queryTimeout = 2 * time.Second
	// perName is the limit of addresses of one name: pools have four, and four are
	// enough for a majority against a wrong one.
	perName = 4
	// maxDistance is the largest error of a usable server: MAXDIST is 1 s in RFC
	// 5905, appendix A.1.1, and 1.5 s in its reference implementation, which
	// accepts servers behind slow links.
	maxDistance = 1500 * time.Millisecond
)

// sample is one address's answer.
type sample struct {
	server   string // as configured, or the offer
	addr     string
	err      error // nothing else is known then
	stratum  int
	offset   time.Duration // to add to our clock
	distance time.Duration // the largest possible error of the offset
	leap     int32         // status bits for the kernel
	voices   int           // of servers that agree: see pick
}

// refusal is a server's kiss of death (RFC 5905 §7.4).
type refusal struct{ code string }

func (r refusal) Error() string { return "the server refuses us: " + r.code }

// resolve is the addresses of a server with port, at most perName.
func resolve(ctx context.Context, server string) ([]string, error) {
	host, port := server, "123"
	if h, p, err := net.SplitHostPort(server); err == nil {
		host, port = h, p
	}
	if a, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return []string{net.JoinHostPort(a.String(), port)}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	at := func(a netip.Addr) string { return net.JoinHostPort(a.Unmap().String(), port) }
	return lists.Of(found[:min(len(found), perName)], at), nil
}

// query asks one address. now is a test's clock, or nil for the kernel's timestamps.
func query(ctx context.Context, addr string, now func() time.Time) (sample, error) {
	opt := ntp.QueryOptions{
		Timeout: queryTimeout,
		Dialer: func(_, remote string) (net.Conn, error) {
			return (&net.Dialer{Timeout: queryTimeout}).DialContext(ctx, "udp", remote)
		},
		GetSystemTime: now,
	}
	r, err := ntp.QueryWithOptions(addr, opt)
	if err != nil {
		return sample{}, err
	}
	if r.IsKissOfDeath() {
		return sample{}, refusal{r.KissCode}
	}
	if err := r.Validate(); err != nil {
		return sample{}, err
	}
	s := sample{stratum: int(r.Stratum), offset: r.ClockOffset, distance: r.RootDistance}
	switch r.Leap {
	case ntp.LeapAddSecond:
		s.leap = staIns
	case ntp.LeapDelSecond:
		s.leap = staDel
	}
	return s, nil
}

// unusable are the servers of which no address says a time, or all say another one than the best, if there is one.
func unusable(all []sample, best sample) (out []string) {
	useful := func(s sample) bool {
		return s.err == nil && (best.addr == "" || (s.offset-best.offset).Abs() <= s.distance+best.distance)
	}
	for _, s := range all {
		if slices.ContainsFunc(all, func(o sample) bool { return o.server == s.server && useful(o) }) {
			continue
		}
		why := fmt.Errorf("%s: its time differs from that of the majority by %s", s.addr, (s.offset - best.offset).Abs().Round(time.Millisecond))
		out = append(out, logs.OneLine(cmp.Or(s.err, why).Error()))
	}
	return out
}

// ServersDisagree: there is no time on which a majority of the servers agrees.
const ServersDisagree reason.Code = "ServersDisagree"

var errDisagree = reason.With(ServersDisagree, errors.New("the time servers disagree"))

// pick takes the servers that agree with the majority, and of them the one with
// the smallest error. Servers agree if the intervals of their times and errors
// have a common point (RFC 5905 §11.2.1). All addresses of one name have one voice, as
// have all names of one address, and all servers that DHCP offers.
func pick(all []sample) (sample, error) {
	errs := lists.Of(all, func(s sample) error { return s.err })
	all = slices.DeleteFunc(slices.Clone(all), func(s sample) bool { return s.err != nil || s.distance > maxDistance })
	if len(all) == 0 {
		return sample{}, cmp.Or(errors.Join(errs...), errors.New("no time server is good enough"))
	}
	var most []sample
	for _, s := range all {
		// A common point, if there is one, is the lower end of some interval.
		point := s.offset - s.distance
		agree := slices.DeleteFunc(slices.Clone(all), func(o sample) bool { return point < o.offset-o.distance || o.offset+o.distance < point })
		if len(agree) > len(most) {
			most = agree
		}
	}
	if 2*len(most) <= len(all) {
		times := lists.Of(all, func(s sample) string { return fmt.Sprintf("%s %s", s.addr, s.offset.Round(time.Millisecond)) })
		return sample{}, fmt.Errorf("%w: %s", errDisagree, strings.Join(times, ", "))
	}
	best := slices.MinFunc(most, func(a, b sample) int { return cmp.Compare(a.distance, b.distance) })
	servers, addrs := map[string]bool{}, map[string]bool{}
	for _, s := range most {
		servers[s.server], addrs[s.addr] = true, true
	}
	best.voices = min(len(servers), len(addrs))
	return best, nil
}
