package containerd

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
)

// An image that can't be had is asked for again after a pause that doubles: a registry that is repaired, and a tag that is pushed, are found soon.
const (
	wishAgain = time.Second
	wishMax   = 30 * time.Second
)

// wishes are the images that are pulled in the background, by namespace and reference.
type wishes struct {
	mu  sync.Mutex // guards all, and what it holds
	all map[[2]string]*wish
}

// wish is one of them.
type wish struct {
	pulling bool
	err     error // of the last try; nil: there was none
	pause   time.Duration
	next    time.Time // the earliest time of the next try
}

// Have is nil once the node has an image. Until then it is why not, and the image is pulled in the background, again and again for as long as Have
// is called. It accepts what Pull accepts, or what the kubelet gets for a pod.
func (c *Containerd) Have(ctx context.Context, namespace, ref string) error {
	cl, err := c.Client()
	if err != nil {
		return err
	}
	ref = known(namespace, ref)
	_, err = cl.ImageService().Get(namespaces.WithNamespace(ctx, namespace), ref)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("look up image %s: %w", ref, err)
	}
	return c.wishes.ask([2]string{namespace, ref}, err == nil, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), pullTimeout)
		defer cancel()
		return dag.Guard(c.Logs.Logger(ID), func() (err error) {
			if namespace == PodNamespace {
				return c.pullAsKubelet(ctx, ref)
			}
			_, err = c.Pull(ctx, namespace, ref, func(reason.Code, string) {})
			return err
		})
	})
}

// pullAsKubelet pulls an image from a medium, or as handleImages does for the kubelet: whether it must be signed depends on that.
func (c *Containerd) pullAsKubelet(ctx context.Context, ref string) error {
	c.fromMedium(ctx, PodNamespace, ref)
	cri, err := c.cri()
	if err != nil {
		return err
	}
	request := appendField(nil, pullRequestImage, appendField(nil, specImage, []byte(ref)))
	if id, err := c.pullForPod(ctx, cri, request); id != "" || err != nil {
		return err
	}
	var answer []byte
	if err := cri.Invoke(ctx, pullImage, &request, &answer, grpc.ForceCodecV2(asItIs{})); err != nil {
		return pullError(ref, err)
	}
	return nil
}

// ask is why an image isn't here. It begins to pull it if it is time.
func (w *wishes) ask(image [2]string, here bool, pull func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if here {
		delete(w.all, image)
		return nil
	}
	it := w.all[image]
	if it == nil {
		it = &wish{}
		if w.all == nil {
			w.all = map[[2]string]*wish{}
		}
		w.all[image] = it
	}
	if !it.pulling && !time.Now().Before(it.next) {
		it.pulling = true
		go func() {
			err := pull()
			w.mu.Lock()
			defer w.mu.Unlock()
			it.pause = min(max(2*it.pause, wishAgain), wishMax)
			it.pulling, it.err, it.next = false, err, time.Now().Add(it.pause)
		}()
	}
	if it.err == nil {
		return reason.With(Pulling, fmt.Errorf("image %s is being pulled", image[1]))
	}
	return it.err
}
