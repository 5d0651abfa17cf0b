package slots

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// A machine that couldn't be installed takes the corrected image at once, and tries the same one after a pause.
func TestConfiguredImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Store: resource.NewStore()})
		set := func(image string) {
			c := &config.Config{}
			c.Machine.Install.Image = image
			must(t, configuration.Configs.Put(s.o.Store.As(configuration.ID), configuration.ConfigID, c))
		}
		set("a")
		began := time.Now()
		if got := s.configured(t.Context(), "a", time.Minute); got != "a" || time.Since(began) != time.Minute {
			t.Errorf("%q after %s", got, time.Since(began))
		}
		began = time.Now()
		time.AfterFunc(time.Second, func() { set("b") })
		if got := s.configured(t.Context(), "a", time.Minute); got != "b" || time.Since(began) != time.Second {
			t.Errorf("%q after %s", got, time.Since(began))
		}
	})
}
