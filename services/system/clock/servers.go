package clock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/beevik/ntp"
	"github.com/garboard-os/garboard/services/core/dag"
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

// sample is one server's answer.
type sample struct {
	server   string // as configured
	addr     string
	stratum  int
	offset   time.Duration // to add to our clock
	distance time.Duration // the largest possible error of the offset
	leap     int32         // status bits for the kernel
}

// refusal is a server's kiss of death (RFC 5905 §7.4).
type refusal struct{ code string }

func (r refusal) Error() string { return "the server refuses us: " + r.code }

// queryFunc asks every address of one server.
type queryFunc func(ctx context.Context, server string, now func() time.Time, skip func(addr string) bool) ([]sample, error)

// network asks over the network.
type network struct {
	log   *slog.Logger
	clock bool // use the given clock instead of the kernel's timestamps
}

func (n network) ask(ctx context.Context, server string, now func() time.Time, skip func(string) bool) ([]sample, error) {
	addrs, err := resolve(ctx, server)
	if err != nil {
		return nil, err
	}
	var (
		mu   sync.Mutex // guards good and errs
		good []sample
		errs []error
		wg   sync.WaitGroup
	)
	for _, addr := range addrs {
		if skip(addr) {
			continue
		}
		wg.Go(func() {
			var s sample
			// The answer may come from any host.
			err := dag.Guard(n.log, func() (err error) {
				s, err = n.query(ctx, addr, now)
				return err
			})
			s.server = server
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, askError{addr, err})
				return
			}
			good = append(good, s)
		})
	}
	wg.Wait()
	return good, errors.Join(errs...)
}

// askError has the address, so that a server that refuses isn't asked again.
type askError struct {
	addr string
	err  error
}

func (e askError) Error() string { return e.addr + ": " + e.err.Error() }
func (e askError) Unwrap() error { return e.err }

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
	var out []string
	for _, a := range found[:min(len(found), perName)] {
		out = append(out, net.JoinHostPort(a.Unmap().String(), port))
	}
	return out, nil
}

func (n network) query(ctx context.Context, addr string, now func() time.Time) (sample, error) {
	opt := ntp.QueryOptions{
		Timeout: queryTimeout,
		Dialer: func(_, remote string) (net.Conn, error) {
			return (&net.Dialer{Timeout: queryTimeout}).DialContext(ctx, "udp", remote)
		},
	}
	if n.clock {
		opt.GetSystemTime = now
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
	s := sample{addr: addr, stratum: int(r.Stratum), offset: r.ClockOffset, distance: r.RootDistance}
	switch r.Leap {
	case ntp.LeapAddSecond:
		s.leap = staIns
	case ntp.LeapDelSecond:
		s.leap = staDel
	}
	return s, nil
}

// ServersDisagree: there is no time on which a majority of the servers agrees.
const ServersDisagree reason.Code = "ServersDisagree"

var errDisagree = reason.With(ServersDisagree, errors.New("the time servers disagree"))

// pick takes the servers that agree with the majority, and of them the one with
// the smallest error. Servers agree if the intervals of their times and errors
// have a common point (RFC 5905 §11.2.1).
func pick(all []sample) (sample, error) {
	all = slices.DeleteFunc(slices.Clone(all), func(s sample) bool { return s.distance > maxDistance })
	if len(all) == 0 {
		return sample{}, errors.New("no time server is good enough")
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
		var times []string
		for _, s := range all {
			times = append(times, fmt.Sprintf("%s %s", s.addr, s.offset.Round(time.Millisecond)))
		}
		return sample{}, fmt.Errorf("%w: %s", errDisagree, strings.Join(times, ", "))
	}
	return slices.MinFunc(most, func(a, b sample) int { return cmp.Compare(a.distance, b.distance) }), nil
}
