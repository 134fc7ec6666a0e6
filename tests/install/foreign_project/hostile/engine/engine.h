#error "dsengine includes engine/engine.h of the program"
