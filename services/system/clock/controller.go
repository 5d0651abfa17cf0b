package clock

import (
	"context"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
)

// StatusController logs when the node's time becomes synchronised, and when it
// no longer is: certificates, and with them most of the other controllers,
// depend on it.
func StatusController() resource.Controller {
	return resource.Controller{
		Name: "v1alpha1.TimeStatusController", Reconcile: (&statusLog{}).reconcile,
		Inputs: []resource.Input{{Type: Statuses.Type(), ID: StatusID}},
	}
}

// statusLog is the controller's state.
type statusLog struct{ logged string }

func (c *statusLog) reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	o, err := Statuses.Get(v, StatusID)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	text := "the time isn't synchronised: " + o.Spec.Message
	switch {
	case o.Spec.Synced && o.Spec.Source == SourceHost:
		text = "the time is the host's"
	case o.Spec.Synced:
		text = fmt.Sprintf("the time is synchronised with %s", o.Spec.Server)
	}
	if text != c.logged {
		c.logged = text
		v.Log().Info(text)
	}
	return 0, nil
}
