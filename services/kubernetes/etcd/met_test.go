package etcd

import (
	"slices"
	"testing"

	"github.com/garboard-os/garboard/services/core/resource"
)

func TestMeet(t *testing.T) {
	t.Parallel()
	e := New(Options{Store: resource.NewStore(), DataDir: t.TempDir(), Journal: t.TempDir() + "/etcd.json"})
	met := func() (ids []string) {
		for _, m := range Met.List(e.o.Store) {
			ids = append(ids, m.ID)
		}
		slices.Sort(ids)
		return ids
	}
	for _, places := range [][]string{
		{"https://10.9.0.3:2380", "10.9.0.4:43210"}, {"[fd00:9::3]:43210", "https://[fd00:9::3]:2379"}, {"[::ffff:10.9.0.3]:1"},
		{"https://name.example:2380", "", "%zz", "https://"},
	} {
		if err := e.Meet(places...); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"10.9.0.3", "10.9.0.4", "fd00:9::3"}; !slices.Equal(met(), want) {
		t.Errorf("met %v, want %v", met(), want)
	}
	first, err := Met.Get(e.o.Store, "10.9.0.3")
	if err != nil || first.Spec.Since.IsZero() || first.Version != 1 {
		t.Errorf("%+v, %v: one that is met again is the same", first, err)
	}
}
