package clock

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
)

func TestKissOfDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		count := map[string]int{}
		ask := func(server string) (time.Duration, error) {
			mu.Lock()
			count[server]++
			mu.Unlock()
			if server == "rude" {
				return 0, refusal{"DENY"}
			}
			return truth(server)
		}
		n := startNode(t, of(&fakeClock{}, ask), config.Time{Servers: []string{"rude", "kind"}})
		time.Sleep(time.Hour)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if count["rude"] != 1 || count["kind"] < 5 || !n.status().Synced {
			t.Errorf("asked %v, status %+v", count, n.status())
		}
		n.stop()
	})
}

func TestPick(t *testing.T) {
	ms := time.Millisecond
	s := func(addr string, offset, distance time.Duration) sample {
		return sample{addr: addr, offset: offset, distance: distance}
	}
	for name, c := range map[string]struct {
		in   []sample
		want string // address, or the error
	}{
		"one":                    {[]sample{s("a", 5*ms, 10*ms)}, "a"},
		"the smallest error":     {[]sample{s("a", 5*ms, 30*ms), s("b", 8*ms, 2*ms), s("c", 6*ms, 9*ms)}, "b"},
		"two against one":        {[]sample{s("a", 5*ms, 30*ms), s("liar", time.Hour, ms), s("c", 6*ms, 9*ms)}, "c"},
		"one word against other": {[]sample{s("a", 0, ms), s("b", time.Hour, ms)}, "the time servers disagree: a 0s, b 1h0m0s"},
		"none":                   {nil, "no time server is good enough"},
		"too far away":           {[]sample{s("a", 0, 2*time.Second)}, "no time server is good enough"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := pick(c.in)
			text := got.addr
			if err != nil {
				text = fmt.Sprint(err)
			}
			if disagree := reason.Of(err) == ServersDisagree; disagree != strings.Contains(c.want, "disagree") {
				t.Errorf("reason %q", reason.Of(err))
			}
			if text != c.want {
				t.Errorf("got %q, want %q", text, c.want)
			}
		})
	}
}

// Each server that is of no use is told, also while the clock is right.
func TestUnusableServersAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ask := func(server string) (time.Duration, error) {
			switch server {
			case "dead":
				return silence(server)
			case "liar":
				return time.Hour, nil
			}
			return truth(server)
		}
		n := startNode(t, of(&fakeClock{}, ask), config.Time{Servers: []string{"a", "dead", "b", "liar", "c"}})
		time.Sleep(time.Minute)
		synctest.Wait()
		s := n.status()
		if !s.Synced || len(s.Unusable) != 2 || !strings.Contains(s.Unusable[0], "dead: i/o timeout") || !strings.Contains(s.Unusable[1], "differs from that of the majority by 1h0m0s") {
			t.Errorf("%+v", s)
		}
		n.stop()
	})
}
