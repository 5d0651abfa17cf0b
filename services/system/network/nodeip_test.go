package network

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/boot"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }

func TestChoose(t *testing.T) {
	type link struct {
		name      string
		metric    uint32
		addresses []netip.Prefix
	}
	on := func(name string, metric uint32, addresses ...string) link {
		l := link{name: name, metric: metric}
		if metric == 0 {
			l.metric = noDefault
		}
		for _, a := range addresses {
			l.addresses = append(l.addresses, prefix(a))
		}
		return l
	}
	for name, c := range map[string]struct {
		links  []link
		valid  []netip.Prefix
		pinned netip.Addr
		want   string
		why    string
	}{
		"one":                     {links: []link{on("eth0", 0, "10.0.0.2/24")}, want: "10.0.0.2", why: "the only address, on eth0"},
		"the default route":       {links: []link{on("eth0", 0, "10.0.0.2/24"), on("eth1", 1024, "10.1.0.2/24")}, want: "10.1.0.2", why: "the first IPv4 address of eth1, which has the default route with the lowest metric (1024)"},
		"the lower metric":        {links: []link{on("eth0", 1024, "10.0.0.2/24"), on("eth1", 100, "10.1.0.2/24")}, want: "10.1.0.2", why: "the first IPv4 address of eth1, which has the default route with the lowest metric (100)"},
		"IPv4 before IPv6":        {links: []link{on("eth0", 1024, "2001:db8::2/64", "10.0.0.2/24")}, want: "10.0.0.2", why: "the first IPv4 address of eth0, which has the default route with the lowest metric (1024)"},
		"no loopback, link-local": {links: []link{on("lo", 0, "127.0.0.1/8"), on("eth0", 0, "169.254.3.4/16", "10.0.0.2/24")}, want: "10.0.0.2", why: "the only address, on eth0"},
		"valid subnets":           {links: []link{on("eth0", 1024, "10.0.0.2/24", "172.16.0.2/24")}, valid: []netip.Prefix{prefix("172.16.0.0/12")}, want: "172.16.0.2", why: "the only address, on eth0"},
		"pinned":                  {links: []link{on("eth0", 1024, "10.0.0.2/24", "10.0.0.3/24")}, pinned: addr("10.0.0.3"), want: "10.0.0.3", why: "on eth0; chosen earlier and still there (by the rule it would be 10.0.0.2: the first IPv4 address of eth0, which has the default route with the lowest metric (1024))"},
		"pinned and gone":         {links: []link{on("eth0", 0, "10.0.0.2/24")}, pinned: addr("10.0.0.9"), want: "10.0.0.2", why: "the only address, on eth0"},
		"nothing":                 {links: []link{on("lo", 0, "127.0.0.1/8")}},
	} {
		t.Run(name, func(t *testing.T) {
			var all []candidate
			for _, l := range c.links {
				for _, p := range l.addresses {
					if eligible(p.Addr(), c.valid) {
						all = append(all, candidate{prefix: p, link: l.name, metric: l.metric})
					}
				}
			}
			got, ok := choose(all, c.pinned)
			if !ok {
				if c.want != "" {
					t.Errorf("nothing was chosen, want %s", c.want)
				}
				return
			}
			if diff := cmp.Diff([]string{c.want, c.why}, []string{got.Primary.String(), got.Why}); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestHostnames(t *testing.T) {
	long := strings.Repeat("a", 60)
	for in, want := range map[string]string{
		"Node-1.Example.ORG.":   "node-1.example.org",
		"rack_3_node":           "",
		"a name":                "",
		"":                      "",
		"-x":                    "",
		"localhost":             "",
		"LOCALHOST.localdomain": "",
		long + ".example.org":   long,
		long + long:             "",
	} {
		if got, err := cleanHostname(in); got != want || (err == nil) != (want != "") {
			t.Errorf("%q is %q (%v), want %q", in, got, err, want)
		}
	}
}

func TestBrokenPinIsLogged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node-address")
	if a, err := boot.Kept(file, netip.ParseAddr); a.IsValid() || err != nil {
		t.Errorf("no file: %v, %v", a, err)
	}
	if err := os.WriteFile(file, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := boot.Kept(file, netip.ParseAddr); err == nil {
		t.Error("nonsense was taken for an address")
	}
}
