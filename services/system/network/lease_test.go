package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
)

// script is a protocol that follows the test's script, and records each call
// with its second.
type script struct {
	start time.Time

	mu     sync.Mutex // guards all following fields
	answer func(what string) (*lease, error)
	asked  []string
}

func (s *script) next(ctx context.Context, what string) (*lease, error) {
	s.mu.Lock()
	s.asked = append(s.asked, fmt.Sprintf("%s@%d", what, int(time.Since(s.start).Seconds()+0.5)))
	l, err := s.answer(what)
	s.mu.Unlock()
	if errors.Is(err, errNoAnswer) {
		<-ctx.Done()
	}
	return l, err
}

func (s *script) set(answer func(what string) (*lease, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

func (s *script) questions() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}

func (s *script) acquire(ctx context.Context, prefer netip.Addr) (*lease, error) {
	what := "acquire"
	if prefer.IsValid() {
		what += "(" + prefer.String() + ")"
	}
	return s.next(ctx, what)
}

func (s *script) extend(ctx context.Context, _ *lease, rebind bool) (*lease, error) {
	if rebind {
		return s.next(ctx, "rebind")
	}
	return s.next(ctx, "renew")
}

// granted is 10.0.0.5/24 from now on.
func granted(t *testing.T, seconds uint32) *lease {
	t.Helper()
	l, err := newLease(ack(t, seconds), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// ack grants 10.0.0.5/24.
func ack(t *testing.T, seconds uint32, more ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	t.Helper()
	m, err := dhcpv4.New(append([]dhcpv4.Modifier{
		dhcpv4.WithMessageType(dhcpv4.MessageTypeAck),
		dhcpv4.WithYourIP(net.IPv4(10, 0, 0, 5)),
		dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
		dhcpv4.WithLeaseTime(seconds),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4(10, 0, 0, 1))),
	}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// running is a client in virtual time.
type running struct {
	*script
	kick chan struct{}
	log  *syncBuffer
	stop func()

	mu      sync.Mutex // guards reports
	reports []string
}

func startClient(t *testing.T, answer func(what string) (*lease, error)) *running {
	t.Helper()
	c := &running{script: &script{start: time.Now(), answer: answer}, kick: make(chan struct{}, 1), log: &syncBuffer{}}
	d := &client{
		source: "DHCP", link: "eth0", protocol: c.script, kick: c.kick, log: slog.New(slog.NewTextHandler(c.log, nil)),
		report: func(l *lease) {
			text := "lost"
			if l != nil {
				text = l.String()
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			c.reports = append(c.reports, fmt.Sprintf("%s@%d", text, int(time.Since(c.start).Seconds()+0.5)))
		},
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { d.run(ctx) })
	c.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(c.stop)
	return c
}

// panicky is a protocol that panics because of a message.
type panicky struct {
	protocol
	asked int
}

func (p *panicky) acquire(context.Context, netip.Addr) (*lease, error) {
	if p.asked++; p.asked == 1 {
		panic("a message that nobody thought of")
	}
	return nil, errNoAnswer
}

// After a message that causes a panic there is a pause, and the machine continues.
func TestDHCPPanicIsSurvived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, log := &panicky{}, &syncBuffer{}
		d := &client{source: "DHCP", link: "eth0", protocol: p, log: slog.New(slog.NewTextHandler(log, nil)), report: func(*lease) {}}
		ctx, cancel := context.WithTimeout(t.Context(), 3*askMax)
		defer cancel()
		d.run(ctx)
		if p.asked < 2 || !strings.Contains(log.String(), "panic: a message that nobody thought of") {
			t.Errorf("asked %d times; log: %s", p.asked, log)
		}
	})
}

func (c *running) reported() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.reports)
}

func TestLeaseIsRenewedAtT1(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startClient(t, func(string) (*lease, error) { return granted(t, 1000), nil })
		time.Sleep(1600 * time.Second)
		c.stop()
		want := []string{"acquire@0", "renew@500", "renew@1000", "renew@1500"}
		if diff := cmp.Diff(want, c.questions()); diff != "" {
			t.Error(diff)
		}
	})
}

// T1 500, T2 875, end 1000. The server is asked at half of the rest, at least
// 60 s apart (RFC 2131 §4.4.5), then any server. Then the lease has ended, and
// the client asks for a new one with the same address.
func TestLeaseOfDeadServerExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startClient(t, func(string) (*lease, error) { return granted(t, 1000), nil })
		synctest.Wait()
		c.set(func(string) (*lease, error) { return nil, errNoAnswer })
		time.Sleep(1000*time.Second + 500*time.Millisecond)
		synctest.Wait()
		want := []string{"acquire@0", "renew@500", "renew@688", "renew@781", "renew@841", "rebind@875", "rebind@938", "rebind@998", "acquire(10.0.0.5)@1000"}
		if diff := cmp.Diff(want, c.questions()[:len(want)]); diff != "" {
			t.Error(diff)
		}
		c.stop()
		if diff := cmp.Diff([]string{"10.0.0.5/24@0", "lost@1000"}, c.reported()); diff != "" {
			t.Error(diff)
		}
	})
}

func TestAnotherServerTakesTheLeaseOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startClient(t, func(string) (*lease, error) { return granted(t, 1000), nil })
		synctest.Wait()
		c.set(func(what string) (*lease, error) {
			if what == "renew" {
				return nil, errNoAnswer
			}
			return granted(t, 1000), nil
		})
		time.Sleep(1000 * time.Second)
		c.stop()
		if diff := cmp.Diff([]string{"10.0.0.5/24@0", "10.0.0.5/24@875"}, c.reported()); diff != "" {
			t.Error(diff)
		}
	})
}

func TestNakEndsTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startClient(t, func(what string) (*lease, error) {
			if what == "renew" {
				return nil, errRefused
			}
			return granted(t, 1000), nil
		})
		time.Sleep(600 * time.Second)
		c.stop()
		if diff := cmp.Diff([]string{"10.0.0.5/24@0", "lost@500", "10.0.0.5/24@500"}, c.reported()); diff != "" {
			t.Error(diff)
		}
	})
}

// A server with the identifier 0.0.0.0 can't be addressed: all servers are asked.
func TestServerWithoutAddress(t *testing.T) {
	none := dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4zero))
	for _, c := range []struct {
		ack    *dhcpv4.DHCPv4
		rebind bool
		want   string
	}{
		{ack(t, 1000), false, "10.0.0.1:67"},
		{ack(t, 1000), true, "255.255.255.255:67"},
		{ack(t, 1000, none), false, "255.255.255.255:67"},
		{ack(t, 1000, none, dhcpv4.WithServerIP(net.IPv4(10, 0, 0, 9))), false, "10.0.0.9:67"},
	} {
		if got := extendAt(c.ack, c.rebind).String(); got != c.want {
			t.Errorf("extended at %s, want %s: %s", got, c.want, c.ack.Summary())
		}
	}
}

// RFC 2131 §3.7: a link that comes back may be on another network. Any server is asked for the lease, whenever it ends;
// one that refuses ends it, and one that doesn't know it offers another address. Without any, the lease stays.
func TestLeaseAfterTheLinkCameBack(t *testing.T) {
	elsewhere, beside := errors.New("192.0.2.5/24"), errors.New("10.0.0.9/24") // what is granted
	for name, tt := range map[string]struct {
		seconds         uint32
		rebind, acquire error
		asked, reported []string
	}{
		"the same network": {1000, nil, nil, []string{"acquire@0", "rebind@100", "renew@600"}, []string{"10.0.0.5/24@0", "10.0.0.5/24@100", "10.0.0.5/24@600"}},
		"infinite lease":   {0xffffffff, nil, nil, []string{"acquire@0", "rebind@100"}, []string{"10.0.0.5/24@0", "10.0.0.5/24@100"}},
		"refused":          {1000, errRefused, nil, []string{"acquire@0", "rebind@100", "acquire(10.0.0.5)@100", "renew@600"}, []string{"10.0.0.5/24@0", "lost@100", "10.0.0.5/24@100", "10.0.0.5/24@600"}},
		"a server that doesn't know it": {
			0xffffffff, errNoAnswer, elsewhere,
			[]string{"acquire@0", "rebind@100", "rebind@110", "rebind@120", "rebind@130", "rebind@140", "rebind@150", "acquire(10.0.0.5)@160"},
			[]string{"10.0.0.5/24@0", "192.0.2.5/24@160"},
		},
		"another server of the same network": {
			0xffffffff, errNoAnswer, beside,
			[]string{"acquire@0", "rebind@100", "rebind@110", "rebind@120", "rebind@130", "rebind@140", "rebind@150", "acquire(10.0.0.5)@160"},
			[]string{"10.0.0.5/24@0", "10.0.0.5/24@160"},
		},
		"no server": {
			1000, errNoAnswer, errNoAnswer,
			[]string{"acquire@0", "rebind@100", "rebind@110", "rebind@120", "rebind@130", "rebind@140", "rebind@150", "acquire(10.0.0.5)@160", "renew@500"},
			[]string{"10.0.0.5/24@0", "10.0.0.5/24@170", "10.0.0.5/24@500"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := startClient(t, func(string) (*lease, error) { return granted(t, tt.seconds), nil })
				time.Sleep(100 * time.Second)
				c.set(func(what string) (*lease, error) {
					switch {
					case what == "rebind" && tt.rebind != nil:
						return nil, tt.rebind
					case what == "acquire(10.0.0.5)" && (tt.acquire == elsewhere || tt.acquire == beside):
						l := granted(t, tt.seconds)
						l.addresses = []leasedAddress{{Prefix: netip.MustParsePrefix(tt.acquire.Error())}}
						return l, nil
					case what == "acquire(10.0.0.5)" && tt.acquire != nil:
						return nil, tt.acquire
					}
					return granted(t, tt.seconds), nil
				})
				c.kick <- struct{}{}
				time.Sleep(550 * time.Second)
				c.stop()
				if diff := cmp.Diff(tt.asked, c.questions()); diff != "" {
					t.Error(diff)
				}
				if diff := cmp.Diff(tt.reported, c.reported()); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func TestInfiniteLeaseIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startClient(t, func(string) (*lease, error) { return granted(t, 0xffffffff), nil })
		time.Sleep(1000 * time.Hour)
		c.stop()
		if got := c.questions(); len(got) != 1 {
			t.Errorf("asked %v", got)
		}
	})
}

// Without an answer the pauses grow, one line is logged, and after the link
// comes back it asks at once.
func TestNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startClient(t, func(string) (*lease, error) { return nil, errNoAnswer })
		time.Sleep(4 * time.Minute)
		synctest.Wait()
		if n := len(c.questions()); n < 7 || n > 10 {
			t.Errorf("asked %d times in 4 minutes: %v", n, c.questions())
		}
		if got := strings.Count(c.log.String(), "no DHCP answer on eth0 for"); got != 1 {
			t.Errorf("said %d times that there is no answer:\n%s", got, c.log)
		}
		// the second: during the wait for the answer to the first
		for _, while := range []time.Duration{0, time.Second} {
			time.Sleep(while)
			before := len(c.questions())
			c.kick <- struct{}{}
			synctest.Wait()
			if after := len(c.questions()); after != before+1 {
				t.Errorf("asked %d times after the link came back, want one more than %d", after, before)
			}
		}
		c.stop()
	})
}

func TestLeaseFromACK(t *testing.T) {
	net24 := func(s string) *net.IPNet { _, n, _ := net.ParseCIDR(s); return n }
	now := time.Now()
	for name, c := range map[string]struct {
		more   []dhcpv4.Modifier
		routes []string
		mtu    int
		t1, t2 time.Duration
	}{
		"router": {
			[]dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptRouter(net.IPv4(10, 0, 0, 1)))},
			[]string{"0.0.0.0/0 via 10.0.0.1 metric 0"}, 0, 500 * time.Second, 875 * time.Second,
		},
		"classless routes replace the router": {
			[]dhcpv4.Modifier{
				dhcpv4.WithOption(dhcpv4.OptRouter(net.IPv4(10, 0, 0, 1))),
				dhcpv4.WithOption(dhcpv4.OptClasslessStaticRoute(
					&dhcpv4.Route{Dest: net24("192.168.0.0/16"), Router: net.IPv4(10, 0, 0, 9)},
					&dhcpv4.Route{Dest: net24("169.254.169.254/32"), Router: net.IPv4zero},
				)),
			},
			[]string{"192.168.0.0/16 via 10.0.0.9 metric 0", "169.254.169.254/32 metric 0"}, 0, 500 * time.Second, 875 * time.Second,
		},
		"times of the server": {
			[]dhcpv4.Modifier{
				dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionRenewTimeValue, []byte{0, 0, 0, 100})),
				dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionRebindingTimeValue, []byte{0, 0, 0, 200})),
			}, nil, 0, 100 * time.Second, 200 * time.Second,
		},
		"times of the server in the wrong order": {
			[]dhcpv4.Modifier{
				dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionRenewTimeValue, []byte{0, 0, 0, 200})),
				dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionRebindingTimeValue, []byte{0, 0, 0, 100})),
			}, nil, 0, 500 * time.Second, 875 * time.Second,
		},
		"MTU": {
			[]dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, []byte{0x05, 0xdc}))},
			nil, 1500, 500 * time.Second, 875 * time.Second,
		},
		"MTU with which IPv6 would end": {
			[]dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, []byte{0x04, 0xff}))},
			nil, 0, 500 * time.Second, 875 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := newLease(ack(t, 1000, c.more...), now)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, r := range l.routes {
				got = append(got, r.String())
			}
			if diff := cmp.Diff(c.routes, got); diff != "" {
				t.Error(diff)
			}
			if l.mtu != c.mtu || l.renewAt.Sub(now) != c.t1 || l.rebindAt.Sub(now) != c.t2 {
				t.Errorf("MTU %d, T1 %s, T2 %s", l.mtu, l.renewAt.Sub(now), l.rebindAt.Sub(now))
			}
		})
	}
	if _, err := newLease(ack(t, 1000, dhcpv4.WithYourIP(net.IPv4zero)), now); err == nil {
		t.Error("an address of 0.0.0.0 was taken")
	}
}

// An answer without an address is good for twice its refresh time, which has a default and a minimum (RFC 8415 §7.6).
func TestInformationOfDHCPv6(t *testing.T) {
	t.Parallel()
	now := time.Now()
	server := dhcpv6.OptServerID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: net.HardwareAddr{2, 5, 0, 0, 0, 1}})
	for refresh, want := range map[time.Duration]time.Duration{
		0: 24 * time.Hour, time.Second: 10 * time.Minute, 2 * time.Hour: 2 * time.Hour, infiniteLease: 0,
	} {
		m, err := dhcpv6.NewMessage(dhcpv6.WithDNS(net.ParseIP("fd98::53"), net.IPv6unspecified, net.ParseIP("fe80::53")))
		if err != nil {
			t.Fatal(err)
		}
		if refresh != 0 {
			m.AddOption(dhcpv6.OptInformationRefreshTime(refresh))
		}
		if _, err := newInformation6("eth0", m, now); !errors.Is(err, errRefused) {
			t.Errorf("an answer of nobody: %v", err)
		}
		m.AddOption(server)
		l, err := newInformation6("eth0", m, now)
		if err != nil {
			t.Fatal(err)
		}
		renew, end := now.Add(want), now.Add(2*want)
		if want == 0 {
			renew, end = now.Add(infiniteLease/2), time.Time{}
		}
		if l.renewAt != renew || l.Expires != end || !slices.Equal(l.Resolvers, []netip.Addr{addr("fd98::53"), addr("fe80::53%eth0")}) || len(l.Problems) != 1 || len(l.addresses) != 0 {
			t.Errorf("refresh time %s: %+v", refresh, l)
		}
	}
}
