package network

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }

func TestChoose(t *testing.T) {
	state := func(metric uint32, addresses ...string) linkState {
		s := linkState{}
		for _, a := range addresses {
			s.addresses = append(s.addresses, prefix(a))
		}
		if metric > 0 {
			s.routes = []route{{network: prefix("0.0.0.0/0"), gateway: addr("192.0.2.1"), metric: metric}}
		}
		return s
	}
	type link struct {
		name string
		linkState
	}
	for name, c := range map[string]struct {
		links  []link
		valid  []netip.Prefix
		pinned netip.Addr
		want   string
		why    string
	}{
		"one":                     {links: []link{{"eth0", state(0, "10.0.0.2/24")}}, want: "10.0.0.2", why: "the only address, on eth0"},
		"the default route":       {links: []link{{"eth0", state(0, "10.0.0.2/24")}, {"eth1", state(1024, "10.1.0.2/24")}}, want: "10.1.0.2", why: "the first IPv4 address of eth1, which has the default route with the lowest metric (1024)"},
		"the lower metric":        {links: []link{{"eth0", state(1024, "10.0.0.2/24")}, {"eth1", state(100, "10.1.0.2/24")}}, want: "10.1.0.2", why: "the first IPv4 address of eth1, which has the default route with the lowest metric (100)"},
		"IPv4 before IPv6":        {links: []link{{"eth0", state(1024, "2001:db8::2/64", "10.0.0.2/24")}}, want: "10.0.0.2", why: "the first IPv4 address of eth0, which has the default route with the lowest metric (1024)"},
		"no loopback, link-local": {links: []link{{"lo", state(0, "127.0.0.1/8")}, {"eth0", state(0, "169.254.3.4/16", "10.0.0.2/24")}}, want: "10.0.0.2", why: "the only address, on eth0"},
		"valid subnets":           {links: []link{{"eth0", state(1024, "10.0.0.2/24", "172.16.0.2/24")}}, valid: []netip.Prefix{prefix("172.16.0.0/12")}, want: "172.16.0.2", why: "the only address, on eth0"},
		"pinned":                  {links: []link{{"eth0", state(1024, "10.0.0.2/24", "10.0.0.3/24")}}, pinned: addr("10.0.0.3"), want: "10.0.0.3", why: "on eth0; chosen earlier and still there (by the rule it would be 10.0.0.2: the first IPv4 address of eth0, which has the default route with the lowest metric (1024))"},
		"pinned and gone":         {links: []link{{"eth0", state(0, "10.0.0.2/24")}}, pinned: addr("10.0.0.9"), want: "10.0.0.2", why: "the only address, on eth0"},
		"nothing":                 {links: []link{{"lo", state(0, "127.0.0.1/8")}}},
	} {
		t.Run(name, func(t *testing.T) {
			var all []candidate
			for _, l := range c.links {
				all = append(all, candidates(l.name, l.linkState, c.valid)...)
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
	for in, want := range map[string]string{
		"Node-1.Example.ORG.": "node-1.example.org",
		"localhost_1":         "",
		"":                    "",
		"-x":                  "",
	} {
		if got := cleanHostname(in); got != want {
			t.Errorf("%q is %q, want %q", in, got, want)
		}
	}
}

func TestBrokenPinIsLogged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node-address")
	if a, err := readPin(file); a.IsValid() || err != nil {
		t.Errorf("no file: %v, %v", a, err)
	}
	if err := os.WriteFile(file, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readPin(file); err == nil {
		t.Error("nonsense was taken for an address")
	}
}
